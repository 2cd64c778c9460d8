"""The logical block pool: who holds which block, and which free block is spent next.

Life of a block:

    scratch ──allocate──► held ──register──► held + hash ──free──► evictable ──┐
       ▲                   │  ▲                  ▲                   │    │    │
       └──────free─────────┘  │                  └──────touch────────┘    │    │
                              └────allocate (the hash dies here)──────────┘    │
                                       a free block is not gone: it is a hit ◄─┘

Free blocks stand in one circular doubly linked list whose links live in two arrays indexed by
block id. Block 0, the null block, is never handed out, and so serves as the list's sentinel.
The order of the list is the eviction policy: allocation takes from the head; a freed block
with a hash goes to the tail; one without a hash goes to the head, because it can never be a hit.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from scheduler.errors import OutOfBlocksError
from scheduler.histogram import Histogram
from scheduler.prefix_cache import BlockHash, PrefixMap

NULL_BLOCK = 0

# One block in 64 has its lifetime measured: enough for a histogram, too few to cost anything.
_SAMPLE_MASK = 63


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """A block's content was lost: its memory was handed to someone else."""

    block_hash: BlockHash


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    pass


CacheEvent: TypeAlias = BlockRemoved | AllBlocksCleared


@dataclass(slots=True)
class Evictions:
    """Counts of lost content; outlives the pool, so that a counter never falls."""

    count: int = 0
    lifetime_seconds: Histogram = field(default_factory=Histogram.of_seconds)
    """From getting a hash to losing it, sampled."""
    idle_seconds: Histogram = field(default_factory=Histogram.of_seconds)
    """From the last holder's leaving to the loss, sampled."""


class BlockPool:
    """`num_blocks` logical blocks, ids 0 to N-1, of which N-1 are usable.

    A block is free exactly if its reference count is 0, and exactly the free blocks stand in
    the queue. `now_seconds` is set by the owner and dates the sampled lifetimes.
    """

    __slots__ = (
        "_cache_events",
        "_evictions",
        "_freed_seconds",
        "_hash",
        "_next",
        "_prefix_map",
        "_previous",
        "_ref_count",
        "_registered_seconds",
        "now_seconds",
        "num_blocks",
        "num_evictable",
        "num_free",
        "num_freed",
    )

    def __init__(
        self,
        num_blocks: int,
        prefix_map: PrefixMap,
        evictions: Evictions,
        cache_events: list[CacheEvent] | None = None,
    ) -> None:
        """`evictions` and, if given, `cache_events` are told of all content that is lost."""
        if num_blocks < 2:
            raise ValueError(f"a pool needs 2 blocks, the null block and one more: {num_blocks}")
        self.num_blocks = num_blocks
        self.num_free = num_blocks - 1
        self.num_evictable = 0
        self.num_freed = 0
        """How often a block became free, ever."""
        self._next = [*range(1, num_blocks), NULL_BLOCK]
        self._previous = [num_blocks - 1, *range(num_blocks - 1)]
        self._ref_count = [0] * num_blocks
        self._hash: list[BlockHash | None] = [None] * num_blocks
        self._prefix_map = prefix_map
        self._evictions = evictions
        self._cache_events = cache_events
        self.now_seconds = 0.0
        self._registered_seconds: dict[int, float] = {}
        self._freed_seconds: dict[int, float] = {}

    # -- what is where ------------------------------------------------------------------

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def num_held(self) -> int:
        return self.num_blocks - 1 - self.num_free

    @property
    def num_scratch(self) -> int:
        return self.num_free - self.num_evictable

    @property
    def usage(self) -> float:
        """Held blocks as a share of the usable ones."""
        return self.num_held / self.num_usable

    def ref_count(self, block: int) -> int:
        return self._ref_count[block]

    def hash_of(self, block: int) -> BlockHash | None:
        return self._hash[block]

    def free_queue(self, *, backwards: bool = False) -> Iterator[int]:
        """The free blocks, the next to be spent first."""
        links = self._previous if backwards else self._next
        block = links[NULL_BLOCK]
        while block != NULL_BLOCK:
            yield block
            block = links[block]

    def num_free_among(self, blocks: Iterable[int]) -> int:
        ref_count = self._ref_count
        return sum(not ref_count[block] for block in blocks)

    # -- moves --------------------------------------------------------------------------

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks from the head of the queue; their old content is lost here.

        Raises OutOfBlocksError, with nothing changed, if fewer are free.
        """
        if count > self.num_free:
            raise OutOfBlocksError(f"{count} blocks asked for, {self.num_free} are free")
        following, ref_count, hashes = self._next, self._ref_count, self._hash
        blocks = []
        block = following[NULL_BLOCK]
        for _ in range(count):
            blocks.append(block)
            ref_count[block] = 1
            if hashes[block] is not None:
                self._evict(block)
            block = following[block]
        following[NULL_BLOCK] = block
        self._previous[block] = NULL_BLOCK
        self.num_free -= count
        return blocks

    def touch(self, blocks: Iterable[int]) -> None:
        """Hold blocks that a lookup found. A free one leaves the queue, wherever it stands."""
        following, previous, ref_count = self._next, self._previous, self._ref_count
        for block in blocks:
            if not ref_count[block]:
                before, after = previous[block], following[block]
                following[before] = after
                previous[after] = before
                self.num_free -= 1
                self.num_evictable -= 1
            ref_count[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Give up one reference of each block. Hashes stay, so what is freed can still be hit.

        Of the blocks that nobody else holds, those with a hash are appended to the queue one
        by one, those without go to its head as one batch, all in the given order. A request
        frees its last block first, so that its unique tail is spent before a shared prefix.
        """
        following, previous = self._next, self._previous
        ref_count, hashes = self._ref_count, self._hash
        hashless = []
        tail = previous[NULL_BLOCK]
        num_evictable = 0
        for block in blocks:
            count = ref_count[block] - 1
            ref_count[block] = count
            if count:
                continue
            if hashes[block] is None:
                hashless.append(block)
                continue
            num_evictable += 1
            following[tail] = block
            previous[block] = tail
            tail = block
            if not block & _SAMPLE_MASK:
                self._freed_seconds[block] = self.now_seconds
        following[tail] = NULL_BLOCK
        previous[NULL_BLOCK] = tail
        if hashless:
            self._prepend(hashless)
        num_freed = num_evictable + len(hashless)
        self.num_evictable += num_evictable
        self.num_free += num_freed
        self.num_freed += num_freed

    def register(self, block: int, block_hash: BlockHash) -> None:
        """Make a held, full block findable under `block_hash`."""
        self._hash[block] = block_hash
        self._prefix_map.insert(block_hash, block)
        if not block & _SAMPLE_MASK:
            self._registered_seconds[block] = self.now_seconds

    def forget(self, block: int) -> None:
        """Take the hash from a held block whose content will not be written after all."""
        self._drop_hash(block)

    def forget_all(self) -> None:
        """Take the hashes from all blocks. The caller sees to it that none is held."""
        for block in self.free_queue():
            self._hash[block] = None
        self._prefix_map.clear()
        self._registered_seconds.clear()
        self.num_evictable = 0
        if self._cache_events is not None:
            self._cache_events.append(AllBlocksCleared())

    def _prepend(self, blocks: Sequence[int]) -> None:
        following, previous = self._next, self._previous
        head = following[NULL_BLOCK]
        before = NULL_BLOCK
        for block in blocks:
            following[before] = block
            previous[block] = before
            before = block
        following[before] = head
        previous[head] = before

    def _evict(self, block: int) -> None:
        block_hash = self._drop_hash(block)
        self.num_evictable -= 1
        evictions = self._evictions
        evictions.count += 1
        if self._cache_events is not None:
            self._cache_events.append(BlockRemoved(block_hash))
        if not block & _SAMPLE_MASK:
            now_seconds = self.now_seconds
            evictions.lifetime_seconds.observe(now_seconds - self._registered_seconds[block])
            evictions.idle_seconds.observe(now_seconds - self._freed_seconds[block])

    def _drop_hash(self, block: int) -> BlockHash:
        block_hash = self._hash[block]
        assert block_hash is not None, f"block {block} has no hash to lose"
        self._hash[block] = None
        self._prefix_map.remove(block_hash, block)
        return block_hash
