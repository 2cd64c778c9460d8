"""Forgetting the prefix cache on purpose, and who is told of lost content (SEMANTICS 1.6, 1.11)."""

import pytest

from scheduler.block_pool import AllBlocksCleared, BlockRemoved
from scheduler.errors import CacheInUseError
from tests.support.drive import Driver, opened, text


def test_reset_forgets_everything() -> None:
    driver = Driver(11)
    driver.submit("A", text("a", 100))
    driver.run()
    driver.core.reset_prefix_cache()
    pool = driver.core.group.pool
    assert (pool.num_held, pool.num_evictable, pool.num_scratch) == (0, 0, 10)
    driver.submit("B", text("a", 100))
    assert opened(driver.plan())["B"].num_computed == 0


def test_reset_while_blocks_are_held_is_refused_with_their_number_and_changes_nothing() -> None:
    driver = Driver(11)
    driver.submit("A", text("a", 40))
    driver.run()
    driver.submit("B", text("b", 40), max_tokens=5)
    driver.step()
    before = dict(driver.core.group.prefix_map.items()), driver.free_queue
    with pytest.raises(CacheInUseError, match="3 blocks are held"):
        driver.core.reset_prefix_cache()
    assert (dict(driver.core.group.prefix_map.items()), driver.free_queue) == before


def test_reset_works_while_requests_only_wait() -> None:
    driver = Driver(11)
    driver.submit("A", text("a", 100))
    driver.run()
    driver.submit("B", text("a", 100))
    driver.core.reset_prefix_cache()
    driver.run()
    assert driver.usage("B").cached_tokens == 0
    assert driver.output("B") == driver.solo("B")


def test_preempted_request_resumes_after_a_reset_of_the_cache() -> None:
    """It has kept the hashes of its blocks, and none of them may be believed."""
    driver = Driver(20, max_num_seqs=1, policy="priority")
    driver.submit("R", text("r", 40), max_tokens=20, priority=1)
    driver.steps(3)
    driver.submit("urgent", text("u", 10), priority=0)
    driver.step()
    assert driver.waiting == ["R"]
    driver.core.reset_prefix_cache()
    driver.run()
    assert driver.output("R") == driver.solo("R")
    interruptions = driver.usage("R").interruptions
    assert interruptions is not None
    assert interruptions.recovered_tokens == 0


def test_reset_tells_of_one_event() -> None:
    driver = Driver(11, record_cache_events=True)
    driver.submit("A", text("a", 100))
    driver.run()
    assert driver.core.take_cache_events() == []
    driver.core.reset_prefix_cache()
    assert driver.core.take_cache_events() == [AllBlocksCleared()]
    assert driver.core.take_cache_events() == []


def test_lost_blocks_are_told_in_the_order_in_which_they_were_handed_out() -> None:
    driver = Driver(4, record_cache_events=True)
    driver.submit("A", text("a", 48))
    driver.run()
    pool = driver.core.group.pool
    hashes = {block: pool.hash_of(block) for block in (1, 2, 3)}
    driver.submit("B", text("b", 20))
    driver.step()
    lost = [event for event in driver.core.take_cache_events() if isinstance(event, BlockRemoved)]
    assert [event.block_hash for event in lost] == [hashes[3], hashes[2]]


def test_core_that_nobody_mirrors_keeps_no_events() -> None:
    driver = Driver(4)
    for name in "ABC":
        driver.submit(name, text(name, 48))
        driver.run()
    assert driver.core.take_cache_events() == []
