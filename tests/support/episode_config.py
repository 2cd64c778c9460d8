"""What an episode of the fake world may look like: small, so that everything happens often."""

import random
from dataclasses import dataclass, replace

from configs import ResolvedCacheConfig, ResolvedSchedulerConfig

_MAX_CAPACITY_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranges:
    """What configurations are drawn from. All else is drawn alike for all."""

    name: str
    windows: tuple[tuple[int, int], ...]
    """(pipeline stages, steps in flight)."""
    block_sizes: tuple[int, ...] = (2, 2, 4, 4, 8, 16)
    num_blocks: tuple[int, int] = (6, 40)
    max_num_seqs: tuple[int, int] = (2, 8)
    prompt_shares: tuple[float, ...] = (0.1, 0.2, 0.4, 0.7)
    """How much of the pool a usual prompt may take."""
    output_tokens: tuple[int, ...] = (8, 20, 40)
    """How long a usual output may be. Short prompts with long outputs fight for blocks."""
    fcfs: float = 0.4
    no_caching: float = 0.15
    no_chunks: float = 0.15
    threshold: float = 0.4
    climbs: float = 0.1
    """Shares of the episodes that have the policy or the setting."""
    num_steps: tuple[int, ...] = (60, 120, 250, 500)


ONE_IN_FLIGHT = Ranges(name="1", windows=((1, 1), (1, 1), (3, 1)))
TWO_IN_FLIGHT = Ranges(name="2", windows=((1, 2),))
PIPELINE = Ranges(name="4", windows=((3, 4),))
"""One step more in flight than there are stages."""
TIGHT = Ranges(
    name="tight",
    windows=((1, 1), (1, 6), (1, 6), (1, 6), (3, 4)),
    block_sizes=(2, 2, 2, 4),
    num_blocks=(8, 28),
    max_num_seqs=(3, 8),
    prompt_shares=(0.2, 0.4, 0.6),
    output_tokens=(12, 24, 40),
    fcfs=0.15,
    no_caching=0.0,
    no_chunks=0.1,
    threshold=0.5,
    climbs=0.6,
    num_steps=(60, 120, 200),
)
"""Small pools in which preemptions, shared blocks and late results meet all the time."""
RANGES = {ranges.name: ranges for ranges in (ONE_IN_FLIGHT, TWO_IN_FLIGHT, PIPELINE, TIGHT)}


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeConfig:
    """What holds for the life of one core, and how the world around it behaves."""

    scheduler: ResolvedSchedulerConfig
    cache: ResolvedCacheConfig
    num_blocks: int
    max_model_len: int
    num_stages: int
    num_steps: int
    """Plans to be made before the episode drains."""
    prompt_tokens: int
    output_tokens: int
    """The most that a usual request has."""
    num_live: int
    """Requests are submitted until so many live,"""
    num_left: int
    """and then not again before so few are left: load comes in tides, or steadily."""
    climbs: bool
    """A long prompt, and beside it short ones, each more urgent than the last: when the pool runs
    dry, the victim has already been planned, in the midst of its prompt."""
    lose_group: float
    lose_scheduler: float
    end: float
    """Chances of rare events, per turn."""
    takes_at_once: bool
    """Token batches are taken after every result, not now and then."""
    reports_all_work: bool

    @property
    def block_size(self) -> int:
        return self.cache.block_size

    @classmethod
    def draw(cls, rng: random.Random, ranges: Ranges) -> "EpisodeConfig":
        num_stages, steps_in_flight = rng.choice(ranges.windows)
        block_size = rng.choice(ranges.block_sizes)
        fewest, most = ranges.num_blocks
        num_blocks = rng.randint(fewest, min(most, _MAX_CAPACITY_TOKENS // block_size))
        capacity_tokens = (num_blocks - 1) * block_size
        max_num_seqs = rng.randint(*ranges.max_num_seqs)
        max_model_len = rng.choice((40, 100, 140))
        chunked = rng.random() >= ranges.no_chunks
        max_num_batched_tokens = rng.randint(8, 64) if chunked else max_model_len
        threshold = 0
        if chunked and rng.random() < ranges.threshold:
            # Several prompts at a time.
            threshold = max(2, max_num_batched_tokens // rng.randint(2, 6))
        num_live = rng.choice((max_num_seqs, rng.randint(2, 2 * max_num_seqs + 2)))
        config = cls(
            scheduler=ResolvedSchedulerConfig(
                policy="fcfs" if rng.random() < ranges.fcfs else "priority",
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                steps_in_flight=steps_in_flight,
                enable_chunked_prefill=chunked,
                long_prefill_token_threshold=threshold,
                resume_first=rng.random() < 0.6,
                slot_preemption=rng.random() < 0.6,
                max_waiting_requests=4 if rng.random() < 0.2 else 2048,
                max_waiting_tokens=200 if rng.random() < 0.2 else 4_000_000,
            ),
            cache=ResolvedCacheConfig(
                block_size=block_size,
                enable_prefix_caching=rng.random() >= ranges.no_caching,
                hash=rng.choice(("xxh3_128", "sha256")),
                hash_seed=rng.getrandbits(64),
            ),
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            num_stages=num_stages,
            num_steps=rng.choice(ranges.num_steps),
            prompt_tokens=max(2, int(capacity_tokens * rng.choice(ranges.prompt_shares))),
            output_tokens=rng.choice(ranges.output_tokens),
            num_live=num_live,
            num_left=rng.choice((num_live - 1, num_live // 4)),
            climbs=False,
            lose_group=rng.choice((0.0, 0.002, 0.01)),
            lose_scheduler=rng.choice((0.0, 0.001)),
            end=rng.choice((0.002, 0.02)),
            takes_at_once=rng.random() < 0.7,
            reports_all_work=rng.random() < 0.3,
        )
        return config._climbing(rng) if rng.random() < ranges.climbs else config

    def _climbing(self, rng: random.Random) -> "EpisodeConfig":
        block_size = 2
        num_blocks = rng.randint(24, 40)
        scheduler = {
            "policy": "priority",
            "max_num_seqs": 8,
            "max_num_batched_tokens": rng.randint(10, 16),
            "max_waiting_requests": 2048,
            "max_waiting_tokens": 4_000_000,
            "enable_chunked_prefill": True,
            "long_prefill_token_threshold": rng.randint(4, 7),
        }
        return replace(
            self,
            scheduler=self.scheduler.model_copy(update=scheduler),
            cache=self.cache.model_copy(update={"block_size": block_size}),
            num_blocks=num_blocks,
            max_model_len=140,
            prompt_tokens=(num_blocks - 1) * block_size * 5 // 6,
            output_tokens=12,
            num_live=7,
            num_left=1,
            climbs=True,
        )
