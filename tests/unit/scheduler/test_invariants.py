"""The checker itself: each kind of damage must be found, or the random tests prove nothing."""

from collections.abc import Callable

import pytest
from msgspec import structs

from scheduler import invariants
from scheduler.errors import BrokenInvariantError
from scheduler.messages import StepPlan
from scheduler.request import Status
from tests.support.drive import Driver, text


def busy() -> Driver:
    """One request runs with a cached prefix, one waits after a preemption, blocks are free."""
    driver = Driver(9, max_num_seqs=2, policy="priority")
    driver.submit("gone", text("a", 32))
    driver.step()
    driver.submit("runs", [*text("a", 32), *text("b", 20)], max_tokens=50, priority=-1)
    driver.submit("waits", text("c", 48), max_tokens=50)
    while "waits" not in driver.waiting or driver.request("waits").bill is None:
        driver.step()
    assert driver.running == ["runs"]
    return driver


def test_healthy_core_passes() -> None:
    driver = busy()
    invariants.check(driver.core)


def lose_a_reference(driver: Driver) -> None:
    driver.core.group.pool._ref_count[driver.blocks("runs")[0]] -= 1


def hold_a_free_block(driver: Driver) -> None:
    driver.core.group.pool._ref_count[driver.free_queue[0]] += 1


def miscount_free_blocks(driver: Driver) -> None:
    driver.core.group.pool.num_free += 1


def miscount_evictable_blocks(driver: Driver) -> None:
    driver.core.group.pool.num_evictable += 1


def break_a_backward_link(driver: Driver) -> None:
    pool = driver.core.group.pool
    first, second, *_ = driver.free_queue
    pool._previous[second] = pool._previous[first]


def give_out_the_null_block(driver: Driver) -> None:
    driver.blocks("runs")[-1] = 0


def drop_a_map_entry(driver: Driver) -> None:
    group = driver.core.group
    block = driver.blocks("runs")[0]
    block_hash = group.pool.hash_of(block)
    assert block_hash is not None
    group.prefix_map.remove(block_hash, block)


def map_a_hash_that_no_block_has(driver: Driver) -> None:
    driver.core.group.prefix_map.insert(b"nobody's", 1)


def lose_a_running_request(driver: Driver) -> None:
    driver.core.group.running.clear()


def run_a_request_twice(driver: Driver) -> None:
    driver.core.group.running.append(driver.request("runs"))


def lose_a_waiting_request(driver: Driver) -> None:
    driver.core.waiting.remove(driver.request("waits"))


def let_a_running_request_wait_too(driver: Driver) -> None:
    driver.core.waiting.push(driver.request("runs"))


def keep_a_finished_request_on_the_running_list(driver: Driver) -> None:
    driver.request("runs").status = Status.FINISHED


def miscount_waiting_tokens(driver: Driver) -> None:
    driver.core.waiting.num_tokens += 1


def miscount_interrupted_requests(driver: Driver) -> None:
    driver.core.waiting.num_interrupted -= 1


def compute_more_than_there_are_slots(driver: Driver) -> None:
    driver.request("runs").num_computed += 16


def know_more_tokens_than_expected(driver: Driver) -> None:
    driver.request("runs").num_expected = 0


def outlive_the_full_length(driver: Driver) -> None:
    driver.request("runs").max_total_tokens = 1


def forget_a_hash(driver: Driver) -> None:
    driver.core.group.pool.forget(driver.blocks("runs")[0])


def hash_a_block_too_early(driver: Driver) -> None:
    driver.core.group.pool.register(driver.blocks("runs")[-1], b"early")


def lose_a_bill(driver: Driver) -> None:
    driver.request("waits").bill = None


@pytest.mark.parametrize(
    "damage",
    [
        lose_a_reference,
        hold_a_free_block,
        miscount_free_blocks,
        miscount_evictable_blocks,
        break_a_backward_link,
        give_out_the_null_block,
        drop_a_map_entry,
        map_a_hash_that_no_block_has,
        lose_a_running_request,
        run_a_request_twice,
        lose_a_waiting_request,
        let_a_running_request_wait_too,
        keep_a_finished_request_on_the_running_list,
        miscount_waiting_tokens,
        miscount_interrupted_requests,
        compute_more_than_there_are_slots,
        know_more_tokens_than_expected,
        outlive_the_full_length,
        forget_a_hash,
        hash_a_block_too_early,
        lose_a_bill,
    ],
)
def test_damage_is_found(damage: Callable[[Driver], None]) -> None:
    driver = busy()
    damage(driver)
    with pytest.raises(BrokenInvariantError):
        invariants.check(driver.core)


# -- the plan ---------------------------------------------------------------------------


def planned() -> tuple[Driver, StepPlan]:
    driver = busy()
    plan = driver.plan()
    assert plan is not None
    assert plan.work
    return driver, plan


def test_plan_over_budget_is_found() -> None:
    driver, plan = planned()
    driver.core.max_num_batched_tokens = 0
    with pytest.raises(BrokenInvariantError, match="the budget is 0"):
        invariants.check(driver.core, plan)


def test_request_planned_twice_is_found() -> None:
    driver, plan = planned()
    twice = structs.replace(plan, work=plan.work * 2)
    with pytest.raises(BrokenInvariantError, match="in the plan twice"):
        invariants.check(driver.core, twice)


def test_work_of_an_old_attempt_is_found() -> None:
    driver, plan = planned()
    work = plan.work[0]
    old = structs.replace(work, seq=structs.replace(work.seq, attempt=0))
    with pytest.raises(BrokenInvariantError, match="planned but not open"):
        invariants.check(driver.core, structs.replace(plan, work=(old,)))


def test_work_that_was_not_counted_is_found() -> None:
    driver, plan = planned()
    more = structs.replace(plan.work[0], num_tokens=plan.work[0].num_tokens + 1)
    with pytest.raises(BrokenInvariantError, match="was not counted"):
        invariants.check(driver.core, structs.replace(plan, work=(more,)))
