"""The block pool on its own: SEMANTICS 1."""

import pytest

from scheduler.block_pool import AllBlocksCleared, BlockPool, BlockRemoved, CacheEvent, Evictions
from scheduler.errors import OutOfBlocksError
from scheduler.prefix_cache import PrefixMap


class Pool(BlockPool):
    """A pool with everything that belongs to it."""

    def __init__(self, num_blocks: int) -> None:
        self.prefix_map = PrefixMap()
        self.evictions = Evictions()
        self.events: list[CacheEvent] = []
        super().__init__(num_blocks, self.prefix_map, self.evictions, self.events)

    def filled(self, count: int) -> list[int]:
        """Allocate `count` blocks and give each a hash that names it."""
        blocks = self.allocate(count)
        for block in blocks:
            self.register(block, b"hash of %d" % block)
        return blocks

    @property
    def counts(self) -> tuple[int, int, int]:
        """(held, evictable, scratch)"""
        return self.num_held, self.num_evictable, self.num_scratch

    @property
    def queue(self) -> list[int]:
        """The free queue; fails if its two directions disagree."""
        forwards = list(self.free_queue())
        assert list(self.free_queue(backwards=True)) == forwards[::-1]
        assert len(forwards) == self.num_free
        return forwards


def test_first_allocation_hands_out_1_2_3() -> None:
    assert Pool(11).allocate(3) == [1, 2, 3]


def test_null_block_is_never_handed_out() -> None:
    pool = Pool(5)
    assert pool.allocate(4) == [1, 2, 3, 4]
    assert pool.num_free == 0


def test_null_block_is_not_counted() -> None:
    pool = Pool(5)
    assert pool.num_usable == 4
    assert pool.counts == (0, 0, 4)


def test_pool_of_the_null_block_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="needs 2 blocks"):
        Pool(1)


def test_allocate_takes_from_the_head() -> None:
    pool = Pool(6)
    pool.free(pool.allocate(5)[:2])
    assert pool.queue == [1, 2]
    assert pool.allocate(1) == [1]


def test_allocating_more_than_is_free_changes_nothing() -> None:
    pool = Pool(6)
    pool.free(reversed(pool.filled(3)))
    before = pool.queue
    with pytest.raises(OutOfBlocksError, match=r"6 blocks asked for, 5 are free"):
        pool.allocate(6)
    assert pool.queue == before
    assert pool.counts == (0, 3, 2)
    assert pool.events == []


def test_allocating_all_that_is_free_empties_the_queue_and_freeing_fills_it() -> None:
    pool = Pool(4)
    blocks = pool.allocate(3)
    assert pool.queue == []
    pool.free(reversed(blocks))
    assert pool.queue == [3, 2, 1]


def test_freed_block_with_a_hash_goes_to_the_tail() -> None:
    pool = Pool(5)
    pool.free(pool.filled(1))
    assert pool.queue == [2, 3, 4, 1]


def test_freed_block_without_a_hash_goes_to_the_head() -> None:
    pool = Pool(5)
    first, *_ = pool.allocate(3)
    pool.free([first])
    assert pool.queue == [1, 4]


def test_hashless_blocks_freed_together_keep_their_order_at_the_head() -> None:
    pool = Pool(6)
    blocks = pool.allocate(3)
    pool.free(reversed(blocks))
    assert pool.queue == [3, 2, 1, 4, 5]


def test_hashless_blocks_freed_later_go_before_those_freed_earlier() -> None:
    pool = Pool(6)
    a, b = pool.allocate(2), pool.allocate(2)
    pool.free(reversed(a))
    pool.free(reversed(b))
    assert pool.queue == [4, 3, 2, 1, 5]


def test_blocks_with_and_without_a_hash_go_to_their_own_ends_in_one_free() -> None:
    pool = Pool(7)
    blocks = [*pool.filled(2), *pool.allocate(2)]
    pool.free(reversed(blocks))
    assert pool.queue == [4, 3, 5, 6, 2, 1]


def test_freeing_keeps_the_hash_and_the_map_entry() -> None:
    pool = Pool(5)
    pool.free(pool.filled(1))
    assert pool.hash_of(1) == b"hash of 1"
    assert pool.prefix_map.get(b"hash of 1") == 1
    assert pool.events == []


def test_freeing_a_shared_block_only_lowers_its_count() -> None:
    pool = Pool(5)
    blocks = pool.filled(2)
    pool.touch(blocks)
    pool.free(blocks)
    assert [pool.ref_count(block) for block in blocks] == [1, 1]
    assert pool.queue == [3, 4]


def test_eviction_happens_when_the_memory_is_handed_out_and_not_before() -> None:
    pool = Pool(3)
    pool.free(pool.filled(1))
    pool.allocate(1)
    assert pool.hash_of(1) == b"hash of 1"
    assert pool.allocate(1) == [1]
    assert pool.hash_of(1) is None
    assert pool.prefix_map.get(b"hash of 1") is None
    assert pool.events == [BlockRemoved(b"hash of 1")]
    assert pool.evictions.count == 1


def test_scratch_is_spent_before_what_can_be_hit() -> None:
    pool = Pool(5)
    cached, scratch = pool.filled(2), pool.allocate(2)
    pool.free(cached)
    pool.free(scratch)
    assert pool.allocate(2) == scratch
    assert pool.evictions.count == 0


def test_touch_takes_a_free_block_out_of_the_middle_of_the_queue() -> None:
    pool = Pool(6)
    blocks = pool.filled(3)
    pool.free(reversed(blocks))
    assert pool.queue == [4, 5, 3, 2, 1]
    pool.touch([2])
    assert pool.queue == [4, 5, 3, 1]
    assert pool.ref_count(2) == 1


@pytest.mark.parametrize("block", [1, 3])
def test_touch_takes_a_free_block_from_either_end(block: int) -> None:
    pool = Pool(4)
    pool.free(pool.filled(3))
    pool.touch([block])
    assert block not in pool.queue
    assert pool.num_free == 2


def test_touching_a_held_block_raises_its_count() -> None:
    pool = Pool(4)
    pool.touch(pool.filled(1))
    assert pool.ref_count(1) == 2
    assert pool.num_free == 2


def test_touched_block_goes_back_to_the_tail() -> None:
    """Which is what makes the order least recently used."""
    pool = Pool(4)
    pool.free(pool.filled(3))
    pool.touch([1])
    pool.free([1])
    assert pool.queue == [2, 3, 1]


def test_usage_counts_held_blocks_alone() -> None:
    pool = Pool(11)
    pool.filled(5)
    assert pool.usage == 0.5
    pool.free([1, 2, 3])
    assert pool.usage == 0.2


def test_warm_and_cold_cache_differ_at_usage_0() -> None:
    warm, cold = Pool(11), Pool(11)
    warm.free(warm.filled(10))
    assert warm.usage == cold.usage == 0
    assert warm.counts == (0, 10, 0)
    assert cold.counts == (0, 0, 10)


def test_held_evictable_and_scratch_always_add_up() -> None:
    pool = Pool(11)
    cached, partial = pool.filled(4), pool.allocate(2)
    assert pool.counts == (6, 0, 4)
    pool.free(reversed([*cached, *partial]))
    assert pool.counts == (0, 4, 6)
    pool.touch(cached[:1])
    assert pool.counts == (1, 3, 6)
    pool.allocate(8)
    assert pool.counts == (9, 1, 0)


def test_number_of_free_blocks_among_some() -> None:
    pool = Pool(6)
    blocks = pool.filled(4)
    pool.free(blocks[:3])
    assert pool.num_free_among(blocks) == 3


def test_two_blocks_may_carry_one_hash_and_the_first_is_found() -> None:
    pool = Pool(5)
    first, second = pool.allocate(2)
    pool.register(first, b"same")
    pool.register(second, b"same")
    assert pool.prefix_map.get(b"same") == first
    pool.free([first])
    pool.allocate(3)
    assert pool.prefix_map.get(b"same") == second


def test_forgotten_block_is_found_no_more_and_freed_as_scratch() -> None:
    pool = Pool(4)
    pool.filled(1)
    pool.forget(1)
    assert pool.prefix_map.get(b"hash of 1") is None
    pool.free([1])
    assert pool.queue == [1, 2, 3]
    assert pool.counts == (0, 0, 3)
    assert pool.evictions.count == 0


def test_forget_all_leaves_scratch_only_and_says_so_once() -> None:
    pool = Pool(6)
    pool.free(pool.filled(3))
    order = pool.queue
    pool.forget_all()
    assert pool.counts == (0, 0, 5)
    assert len(pool.prefix_map) == 0
    assert pool.events == [AllBlocksCleared()]
    assert pool.queue == order


def test_pool_without_a_listener_keeps_no_events() -> None:
    pool = BlockPool(3, PrefixMap(), evictions := Evictions())
    pool.register(pool.allocate(1)[0], b"hash")
    pool.free([1])
    pool.allocate(2)
    pool.free([1, 2])
    pool.forget_all()
    assert evictions.count == 1


def test_one_block_in_64_has_its_lifetime_measured() -> None:
    pool = Pool(129)
    pool.now_seconds = 10.0
    pool.filled(128)
    pool.now_seconds = 15.0
    pool.free(range(1, 129))
    pool.now_seconds = 30.0
    pool.allocate(128)
    evictions = pool.evictions
    assert evictions.count == 128
    assert (evictions.lifetime_seconds.count, evictions.lifetime_seconds.sum) == (2, 40.0)
    assert (evictions.idle_seconds.count, evictions.idle_seconds.sum) == (2, 30.0)
