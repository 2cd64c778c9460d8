"""All that belongs to one worker group, and dies with it: pool, prefix map, tables, window."""

from dataclasses import dataclass

from scheduler.block_pool import BlockPool, CacheEvent, Evictions
from scheduler.kv_manager import KVManager
from scheduler.messages import Close, CloseReason
from scheduler.prefix_cache import BlockHasher, PrefixMap
from scheduler.request import Request
from scheduler.window import Window


@dataclass(frozen=True, slots=True)
class Pipeline:
    """How plans flow through the workers of a group."""

    num_stages: int
    steps_in_flight: int
    """Plans that are made before the first of them has answered."""


@dataclass(frozen=True, slots=True)
class GroupSize:
    """What the workers of a group agreed on."""

    num_ranks: int
    num_blocks: int
    """With the null block."""
    max_model_len: int
    vocab_size: int
    pipeline: Pipeline | None = None
    """None: as the scheduler is configured."""


class WorkerGroup:
    """One epoch of a worker group, as the scheduler sees it. A new epoch starts with a new one."""

    def __init__(
        self,
        *,
        epoch: int,
        num_blocks: int,
        pipeline: Pipeline,
        hasher: BlockHasher,
        block_size: int,
        enable_prefix_caching: bool,
        evictions: Evictions,
        cache_events: list[CacheEvent] | None,
    ) -> None:
        self.epoch = epoch
        self.pipeline = pipeline
        self.prefix_map = PrefixMap()
        self.pool = BlockPool(num_blocks, self.prefix_map, evictions, cache_events)
        self.kv = KVManager(
            self.pool,
            self.prefix_map,
            hasher,
            block_size=block_size,
            enable_prefix_caching=enable_prefix_caching,
        )
        self.window = Window(pipeline.steps_in_flight)
        self.running: list[Request] = []
        """In the order of admission."""
        self.closed: list[Close] = []
        """Tables closed since the last plan, which will tell the workers."""

    @property
    def capacity_tokens(self) -> int:
        return self.pool.num_usable * self.kv.block_size

    def is_in_flight(self, request: Request) -> bool:
        """Some plan that contains work of `request`, of whatever attempt, is unanswered."""
        return self.window.is_in_flight(request.last_planned_step)

    def close_table(self, request: Request, reason: CloseReason) -> None:
        self.kv.release(request)
        self.closed.append(Close(request.ref, reason))
