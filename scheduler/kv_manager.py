"""Block tables: between a request that wants token slots and the pool that has blocks.

    0              num_hit                         num_tokens
    |── hit blocks ───|── new blocks, as far as planned ──|        blocks needed at admission
    |── held by somebody ──|── evictable ──|                       hit blocks, by who has them

A hit block that somebody holds costs nothing; an evictable one leaves the free queue, so it
counts as demand just like a new block. All of a request's blocks are `request.block_ids`;
whoever calls `release` gives them all back.
"""

from dataclasses import dataclass

from scheduler.block_pool import BlockPool
from scheduler.prefix_cache import BlockHash, BlockHasher, PrefixMap
from scheduler.request import NEVER, Request


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Why the next in the queue could not be admitted. It may wait for long, and looking a long
    prompt up again in every step would cost more than the step's own decisions."""

    request: Request
    num_freed: int
    first_missing: BlockHash | None
    """None: every block that it may take from the cache was found."""


class KVManager:
    def __init__(
        self,
        pool: BlockPool,
        prefix_map: PrefixMap,
        hasher: BlockHasher,
        *,
        block_size: int,
        enable_prefix_caching: bool,
    ) -> None:
        self._pool = pool
        self._prefix_map = prefix_map
        self._hasher = hasher
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._refusal: _Refusal | None = None

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def find_hit(self, request: Request) -> list[int]:
        """The cached blocks that `request` could start with. Holds nothing: valid until the
        pool next changes."""
        if not self.enable_prefix_caching:
            return []
        num_blocks = request.hit_limit // self.block_size
        self._extend_hashes(request, num_blocks)
        return self._prefix_map.longest_hit(request.block_hashes[:num_blocks])

    def is_still_refused(self, request: Request) -> bool:
        """`admit` would say no again, which is known without another lookup.

        Since it last said so no block was freed, nobody was admitted who could now hold a
        block that this request shares, and the block that ended its hit is still missing.
        """
        refusal = self._refusal
        return (
            refusal is not None
            and refusal.request is request
            and refusal.num_freed == self._pool.num_freed
            and (
                refusal.first_missing is None or self._prefix_map.get(refusal.first_missing) is None
            )
        )

    def admit(self, request: Request, hit: list[int], num_slots: int) -> bool:
        """Open a table of the `hit` blocks and new ones, `num_slots` token slots in all.

        All or nothing: False, and nothing changed, unless all known tokens of the request
        would fit now, so that a long prompt does not start what it cannot finish.
        """
        pool = self._pool
        num_new = self.blocks_for(request.num_tokens) - len(hit)
        if num_new + pool.num_free_among(hit) > pool.num_free:
            self._refusal = _Refusal(request, pool.num_freed, self._first_missing(request, hit))
            return False
        self._refusal = None
        pool.touch(hit)
        new = pool.allocate(self.blocks_for(num_slots) - len(hit))
        request.block_ids = hit + new
        request.num_registered = len(hit)
        request.next_hash_at = NEVER
        if self.enable_prefix_caching:
            request.next_hash_at = (len(hit) + 1) * self.block_size
        return True

    def grow(self, request: Request, num_slots: int) -> bool:
        """Extend the table to `num_slots` token slots. False, and nothing changed, if the
        pool has too few free blocks."""
        num_new = self.blocks_for(num_slots) - len(request.block_ids)
        if num_new > self._pool.num_free:
            return False
        request.block_ids += self._pool.allocate(num_new)
        return True

    def register(self, request: Request) -> None:
        """Make the blocks findable whose slots are all planned and whose ids are all known."""
        num_full = min(request.num_computed, request.num_tokens) // self.block_size
        self._extend_hashes(request, num_full)
        for i in range(request.num_registered, num_full):
            self._pool.register(request.block_ids[i], request.block_hashes[i])
        request.num_registered = max(num_full, request.num_registered)
        request.next_hash_at = (request.num_registered + 1) * self.block_size

    def take_back(self, request: Request, start: int) -> None:
        """The slots from `start` on were planned and will not be written: nobody may find them."""
        for i in range(start // self.block_size, request.num_registered):
            self._pool.forget(request.block_ids[i])
        request.num_registered = min(request.num_registered, start // self.block_size)

    def release(self, request: Request) -> None:
        """Close the table. Last block first, so that the unique tail is spent before what
        others share; the hashes stay."""
        self._pool.free(reversed(request.block_ids))
        request.block_ids = []
        request.num_registered = 0
        request.next_hash_at = NEVER

    def _first_missing(self, request: Request, hit: list[int]) -> BlockHash | None:
        num_blocks = request.hit_limit // self.block_size
        missing = request.block_hashes[len(hit) : num_blocks]
        return missing[0] if missing else None

    def _extend_hashes(self, request: Request, num_blocks: int) -> None:
        hashes = request.block_hashes
        if len(hashes) >= num_blocks:
            return
        parent = hashes[-1] if hashes else self._hasher.root(request.cache_salt)
        first = len(hashes) * self.block_size
        token_ids = request.token_ids[first : num_blocks * self.block_size]
        hashes += self._hasher.chain(parent, token_ids.tobytes())
