"""Random configurations and random requests, small enough that everything happens often."""

import random
from collections import deque
from dataclasses import dataclass
from enum import Enum

from msgspec import structs

from configs import ResolvedCacheConfig, ResolvedSchedulerConfig
from scheduler.messages import SamplingParams, SubmitRequest, Usage, pack_token_ids
from tests.support.fake_model import VOCABULARY, SoloRun, run_solo

EOS_TOKEN_IDS = (1, 5)
STOP_TOKEN_IDS = (2, 9)

_TOKEN_OF_BYTE = bytes(byte % VOCABULARY for byte in range(256))


class Window(Enum):
    """How many steps are in flight, and so how many stages there are."""

    ONE = "1"
    TWO = "2"
    PIPELINE = "4"
    """Three stages, and one step more."""
    ANY = "any"
    """Drawn anew for every episode."""

    def draw(self, rng: random.Random) -> tuple[int, int]:
        """(number of stages, steps in flight)."""
        match self:
            case Window.ONE:
                return rng.choice((1, 1, 3)), 1
            case Window.TWO:
                return 1, 2
            case Window.PIPELINE:
                return 3, 4
            case Window.ANY:
                return rng.choice(((1, 2), (1, 3), (1, 4), (2, 3), (3, 4)))


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
    num_live: int
    """Requests that the world keeps alive."""
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
    def draw(cls, rng: random.Random, window: Window) -> "EpisodeConfig":
        num_stages, steps_in_flight = window.draw(rng)
        block_size = rng.choice((2, 4, 4, 8, 16))
        num_blocks = rng.randint(6, min(40, 256 // block_size))
        max_num_seqs = rng.randint(2, 8)
        max_model_len = rng.choice((40, 100, 140))
        chunked = rng.random() < 0.85
        return cls(
            scheduler=ResolvedSchedulerConfig(
                policy=rng.choice(("fcfs", "priority")),
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=rng.randint(8, 64) if chunked else max_model_len,
                steps_in_flight=steps_in_flight,
                enable_chunked_prefill=chunked,
                long_prefill_token_threshold=rng.randint(3, 20)
                if chunked and rng.random() < 0.3
                else 0,
                resume_first=rng.random() < 0.6,
                slot_preemption=rng.random() < 0.6,
                max_waiting_requests=4 if rng.random() < 0.2 else 2048,
                max_waiting_tokens=200 if rng.random() < 0.2 else 4_000_000,
            ),
            cache=ResolvedCacheConfig(
                block_size=block_size,
                enable_prefix_caching=rng.random() < 0.85,
                hash=rng.choice(("xxh3_128", "sha256")),
                hash_seed=rng.getrandbits(64),
            ),
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            num_stages=num_stages,
            num_steps=rng.choice((60, 120, 250, 500)),
            num_live=rng.randint(2, 2 * max_num_seqs + 2),
            lose_group=rng.choice((0.0, 0.002, 0.01)),
            lose_scheduler=rng.choice((0.0, 0.001)),
            end=rng.choice((0.002, 0.02)),
            takes_at_once=rng.random() < 0.7,
            reports_all_work=rng.random() < 0.3,
        )


@dataclass(frozen=True, slots=True)
class Job:
    """A request and what must come of it."""

    message: SubmitRequest
    prompt: tuple[int, ...]
    solo: SoloRun


def _of_choice(sampling: SamplingParams, choice: int) -> SamplingParams:
    return structs.replace(sampling, seed=sampling.seed + choice * 7907)


class Workload:
    """Draws requests that share much: documents, whole prompts, earlier answers."""

    def __init__(self, rng: random.Random, config: EpisodeConfig) -> None:
        self._rng = rng
        self._block_size = config.block_size
        self._has_priorities = config.scheduler.policy == "priority"
        self._max_model_len = config.max_model_len
        self._max_prompt_tokens = min(80, config.max_model_len - 1)
        capacity_tokens = (config.num_blocks - 1) * config.block_size
        self._usual_prompt_tokens = min(
            self._max_prompt_tokens, max(4, int(capacity_tokens * rng.uniform(0.1, 0.7)))
        )
        self._documents = [self._tokens(80) for _ in range(2)]
        self._recent: deque[Job] = deque(maxlen=6)
        self._count = 0

    def draw(self, now: float) -> list[Job]:
        """The requests of one submission: one, or several choices of one prompt."""
        rng = self._rng
        self._count += 1
        num_choices = 1 if rng.random() < 0.85 else rng.randint(2, 4)
        prompt = self._prompt()
        sampling = self._sampling()
        priority = rng.choice((0, 0, 1, 2, -1)) if self._has_priorities else 0
        salt = "" if rng.random() < 0.8 else rng.choice(("blue", "red"))
        jobs = []
        for choice in range(num_choices):
            jobs.append(
                self._job(
                    f"r{self._count}/{choice}",
                    prompt,
                    _of_choice(sampling, choice),
                    priority,
                    salt,
                    now,
                )
            )
        if num_choices == 1 and rng.random() < 0.03:
            jobs = [self._continuation(jobs[0])]
        self._recent.append(jobs[0])
        return jobs

    def _job(
        self,
        request_id: str,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        priority: int,
        salt: str,
        now: float,
    ) -> Job:
        message = SubmitRequest(
            request_id=request_id,
            client_id="left" if self._rng.random() < 0.5 else "right",
            prompt_token_ids=pack_token_ids(prompt),
            sampling=sampling,
            arrival_seconds=now,
            priority=priority,
            cache_salt=salt,
        )
        return Job(message, prompt, run_solo(prompt, sampling, self._max_model_len))

    def _continuation(self, job: Job) -> Job:
        """The same request, some of whose tokens came from an earlier scheduler."""
        old = job.message
        num_known = self._rng.randrange(len(job.solo.token_ids))
        message = SubmitRequest(
            request_id=old.request_id,
            client_id=old.client_id,
            prompt_token_ids=old.prompt_token_ids,
            sampling=old.sampling,
            arrival_seconds=old.arrival_seconds - self._rng.uniform(0, 5),
            priority=old.priority,
            cache_salt=old.cache_salt,
            output_token_ids=pack_token_ids(job.solo.token_ids[:num_known]),
            usage_so_far=Usage(len(job.prompt), num_known, 0),
        )
        return Job(message, job.prompt, job.solo)

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._rng.randbytes(count).translate(_TOKEN_OF_BYTE))

    def _length(self) -> int:
        """A prompt length, often one that fills its last block, rarely one that cannot fit."""
        rng = self._rng
        limit = self._max_prompt_tokens if rng.random() < 0.03 else self._usual_prompt_tokens
        length = rng.randint(1, limit)
        if rng.random() < 0.3:
            length -= length % self._block_size
        return max(length, 1)

    def _prompt(self) -> tuple[int, ...]:
        rng = self._rng
        kind = rng.random()
        length = self._length()
        if kind < 0.2 or not self._recent:
            return self._tokens(length)
        if kind < 0.5:
            shared = rng.choice(self._documents)[:length]
            num_own = 0 if rng.random() < 0.3 else rng.randint(0, 6)
            return (shared + self._tokens(num_own))[: self._max_prompt_tokens]
        earlier = rng.choice(self._recent)
        if kind < 0.7:
            return earlier.prompt
        if kind < 0.9:
            turn = earlier.solo.token_ids[: rng.randint(1, len(earlier.solo.token_ids))]
            return (earlier.prompt + turn + self._tokens(rng.randint(0, 4)))[
                : self._usual_prompt_tokens
            ]
        return earlier.prompt[:length]

    def _sampling(self) -> SamplingParams:
        rng = self._rng
        max_tokens = rng.choice((1, rng.randint(1, 8), rng.randint(8, 24), rng.randint(16, 40)))
        return SamplingParams(
            seed=rng.getrandbits(32),
            max_tokens=max_tokens,
            min_tokens=rng.randint(0, max_tokens) if rng.random() < 0.2 else 0,
            eos_token_ids=EOS_TOKEN_IDS if rng.random() < 0.5 else (),
            stop_token_ids=STOP_TOKEN_IDS if rng.random() < 0.2 else (),
            ignore_eos=rng.random() < 0.1,
            logprobs=rng.randint(0, 2) if rng.random() < 0.1 else None,
            prompt_logprobs=rng.randint(0, 2) if rng.random() < 0.1 else None,
        )
