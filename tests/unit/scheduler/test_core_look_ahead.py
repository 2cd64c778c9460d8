"""Steps planned before results are back: SEMANTICS 4.7 and 5.3."""

import pytest

from scheduler.messages import CloseReason, FinishReason, SeqOutput, StepResult, unpack_token_ids
from scheduler.request import Status
from tests.support.drive import Driver, closed, extended, opened, sampled, scheduled, text


def ahead(num_blocks: int = 20, steps_in_flight: int = 2, **settings: object) -> Driver:
    return Driver(num_blocks, steps_in_flight=steps_in_flight, **settings)  # type: ignore[arg-type]


# -- the window -------------------------------------------------------------------------


@pytest.mark.parametrize("steps_in_flight", [1, 2, 5])
def test_no_more_plans_than_the_window_holds(steps_in_flight: int) -> None:
    driver = ahead(steps_in_flight=steps_in_flight)
    driver.submit("A", text("a", 10), max_tokens=50)
    for _ in range(steps_in_flight):
        assert driver.plan() is not None
    assert driver.plan() is None
    driver.answer()
    assert driver.plan() is not None


def test_next_token_is_planned_before_the_last_one_is_known() -> None:
    driver = ahead()
    driver.submit("A", text("a", 10), max_tokens=5)
    driver.plan()
    plan = driver.plan()
    assert plan is not None
    (work,) = plan.work
    assert (work.start, work.num_tokens, work.sample) == (10, 1, True)
    assert driver.request("A").num_tokens == 10


def test_chunks_of_one_prompt_may_be_in_flight_together() -> None:
    driver = ahead(max_num_batched_tokens=16)
    driver.submit("A", text("a", 40), max_tokens=5)
    assert [scheduled(driver.plan()), scheduled(driver.plan())] == [{"A": 16}, {"A": 16}]


def test_sampled_ids_are_not_sent_back_to_those_who_sampled_them() -> None:
    driver = ahead()
    driver.submit("A", text("a", 10), max_tokens=50)
    driver.run()
    assert all(
        update.token_ids == () for plan in driver.plans for update in extended(plan).values()
    )


# -- no further than the end ------------------------------------------------------------


@pytest.mark.parametrize("steps_in_flight", [1, 2, 4])
def test_nothing_is_planned_past_the_last_token(steps_in_flight: int) -> None:
    driver = ahead(steps_in_flight=steps_in_flight)
    driver.submit("A", text("a", 10), max_tokens=4)
    driver.run()
    assert sum(scheduled(plan).get("A", 0) for plan in driver.plans) == 10 + 4 - 1


@pytest.mark.parametrize("steps_in_flight", [1, 2, 4])
def test_nothing_is_planned_past_the_context(steps_in_flight: int) -> None:
    driver = ahead(steps_in_flight=steps_in_flight, max_model_len=32)
    driver.submit("A", text("a", 30), max_tokens=50)
    driver.run()
    assert max(work.start + work.num_tokens for plan in driver.plans for work in plan.work) == 31
    assert driver.output("A") == driver.solo("A")[:2]


@pytest.mark.parametrize("steps_in_flight", [1, 2, 4])
def test_text_does_not_depend_on_how_far_ahead_is_planned(steps_in_flight: int) -> None:
    driver = ahead(9, steps_in_flight=steps_in_flight, max_num_batched_tokens=25)
    for name in "ABCD":
        driver.submit(name, text(name, 30), max_tokens=20)
    driver.run()
    for name in "ABCD":
        assert driver.output(name) == driver.solo(name)


# -- overshoot --------------------------------------------------------------------------


def stopped() -> Driver:
    """A's first token is a stop, while the step after it is already in flight."""
    driver = ahead()
    driver.script["A"] = [7, 8, 9]
    driver.submit("A", text("a", 15), max_tokens=50, eos_token_ids=(7,))
    driver.plan()
    driver.plan()
    driver.answer()
    return driver


def test_stop_ends_the_request_while_its_next_step_is_in_flight() -> None:
    driver = stopped()
    assert driver.finish("A") is FinishReason.STOP
    assert driver.output("A") == [7]


def test_overshoot_is_ignored() -> None:
    driver = stopped()
    driver.answer()
    assert driver.output("A") == [7]
    assert len(driver.deltas["A"]) == 1


def test_blocks_are_free_at_once_although_the_overshoot_is_in_flight() -> None:
    """Workers apply plans in order, so whoever gets them next writes after it (2.6)."""
    driver = stopped()
    assert driver.core.group.pool.num_held == 0
    driver.submit("B", text("b", 300))
    plan = driver.plan()
    assert closed(plan)["A"].reason is CloseReason.FINISHED
    assert scheduled(plan) == {"B": 300}


# -- hashes -----------------------------------------------------------------------------


def num_hashed(driver: Driver, name: str) -> int:
    pool = driver.core.group.pool
    return sum(pool.hash_of(block) is not None for block in driver.blocks(name))


def test_full_block_gets_no_hash_before_its_last_id_is_known() -> None:
    driver = ahead()
    driver.submit("A", text("a", 15), max_tokens=50)
    driver.plan()
    driver.plan()
    assert driver.request("A").num_computed == 16
    assert num_hashed(driver, "A") == 0
    driver.answer()
    assert num_hashed(driver, "A") == 1


def test_block_is_found_with_the_ids_that_were_sampled() -> None:
    driver = ahead()
    driver.submit("A", text("a", 15), max_tokens=20, seed=0)
    driver.run()
    driver.submit("B", [*text("a", 15), sampled(0, 15), 99])
    assert opened(driver.plan())["B"].num_computed == 16


# -- preempted with results in flight ---------------------------------------------------


def preempted_in_flight() -> Driver:
    """B is preempted by the second plan, while the token of the first is under way."""
    driver = ahead(5)
    driver.submit("A", text("a", 31), max_tokens=30)
    driver.submit("B", text("b", 32), max_tokens=30)
    driver.plan()
    assert "B" in closed(driver.plan())
    return driver


def test_token_on_its_way_counts_while_the_request_waits() -> None:
    driver = preempted_in_flight()
    driver.answer()
    assert driver.output("B") == driver.solo("B")[:1]
    request = driver.request("B")
    assert request.status is Status.WAITING
    assert (request.num_computed, request.num_tokens) == (0, 33)


def test_token_that_arrives_while_waiting_registers_no_hash() -> None:
    """It would fill the second block, if there were a table."""
    driver = ahead(5)
    driver.submit("A", text("a", 32), max_tokens=30)
    driver.submit("B", text("b", 31), max_tokens=30)
    driver.plan()
    driver.plan()
    assert driver.waiting == ["B"]
    before = len(driver.core.group.prefix_map)
    driver.answer()
    assert driver.request("B").num_tokens == 32
    assert len(driver.core.group.prefix_map) == before


def test_token_that_arrives_while_waiting_can_be_the_last() -> None:
    """WAITING to FINISHED is legal then."""
    driver = ahead(5)
    driver.script["B"] = [7]
    driver.submit("A", text("a", 31), max_tokens=30)
    driver.submit("B", text("b", 32), max_tokens=30, stop_token_ids=(7,))
    driver.plan()
    driver.plan()
    assert driver.waiting == ["B"]
    driver.answer()
    assert driver.finish("B") is FinishReason.STOP
    assert driver.waiting == []
    driver.run()
    assert driver.output("B") == [7]


def test_token_that_arrives_while_waiting_counts_for_the_queue() -> None:
    driver = preempted_in_flight()
    before = driver.core.waiting.num_tokens
    driver.answer()
    assert driver.core.waiting.num_tokens == before + 1


def test_token_that_arrives_while_waiting_is_opened_with_the_others() -> None:
    driver = preempted_in_flight()
    driver.answer()
    driver.end("A")
    driver.answer()
    token_ids = list(unpack_token_ids(opened(driver.plan())["B"].token_ids))
    assert token_ids == [*text("b", 32), *driver.solo("B")[:1]]


def test_result_of_an_earlier_attempt_is_dropped_and_computed_again() -> None:
    driver = preempted_in_flight()
    late = driver.in_flight[0]
    (output,) = (o for o in driver.result_of(late).outputs if o.seq.request_id == "B")
    driver.answer()
    driver.answer()
    driver.end("A")
    plan = driver.plan()
    assert plan is not None
    assert output.seq.attempt == 1
    assert opened(plan)["B"].seq.attempt == 2
    driver.in_flight.popleft()
    old = SeqOutput(output.seq, (666,))
    new = driver.result_of(plan).outputs
    driver.deliver(StepResult(plan.epoch, plan.step_id, (old, *new)))
    assert driver.output("B") == driver.solo("B")[:2]


def test_error_of_an_earlier_attempt_is_dropped_too() -> None:
    driver = preempted_in_flight()
    driver.answer()
    driver.answer()
    old = driver.request("B").ref
    driver.end("A")
    plan = driver.plan()
    assert plan is not None
    driver.in_flight.popleft()
    driver.deliver(StepResult(plan.epoch, plan.step_id, (SeqOutput(old, (), error="too late"),)))
    assert driver.finish("B") is None
