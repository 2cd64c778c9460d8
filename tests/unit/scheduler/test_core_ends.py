"""How requests end, in whatever state they are: SEMANTICS 6."""

from collections.abc import Callable

import pytest

from scheduler.messages import (
    CloseReason,
    EndReason,
    FinishReason,
    SamplingParams,
    SeqOutput,
    StepResult,
)
from tests.support.drive import Driver, closed, request_of, text

# -- states to end in -------------------------------------------------------------------


def waiting() -> Driver:
    driver = Driver(11)
    driver.submit("R", text("r", 20), max_tokens=30)
    return driver


def running() -> Driver:
    driver = waiting()
    driver.steps(3)
    return driver


def half_prefilled() -> Driver:
    driver = Driver(11, max_num_batched_tokens=8)
    driver.submit("R", text("r", 20), max_tokens=30)
    driver.step()
    return driver


def in_flight() -> Driver:
    driver = Driver(11, steps_in_flight=2)
    driver.submit("R", text("r", 20), max_tokens=30)
    driver.plan()
    driver.plan()
    return driver


def preempted() -> Driver:
    driver = Driver(5)
    driver.submit("A", text("a", 31), max_tokens=30)
    driver.submit("R", text("r", 31), max_tokens=30)
    driver.steps(3)
    assert driver.waiting == ["R"]
    return driver


def preempted_in_flight() -> Driver:
    driver = Driver(5, steps_in_flight=2)
    driver.submit("A", text("a", 31), max_tokens=30)
    driver.submit("R", text("r", 32), max_tokens=30)
    driver.plan()
    driver.plan()
    assert driver.waiting == ["R"]
    return driver


def resumed() -> Driver:
    driver = preempted()
    driver.end("A")
    driver.step()
    assert driver.running == ["R"]
    return driver


def lost() -> Driver:
    driver = running()
    driver.lose_group()
    return driver


def shared() -> Driver:
    driver = Driver(11)
    driver.submit("other", text("r", 40), max_tokens=30)
    driver.step()
    driver.submit("R", text("r", 40), max_tokens=30)
    driver.step()
    return driver


STATES = [
    waiting,
    running,
    half_prefilled,
    in_flight,
    preempted,
    preempted_in_flight,
    resumed,
    lost,
    shared,
]
in_every_state = pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
State = Callable[[], Driver]


@in_every_state
def test_abort_ends_with_one_terminal_message(state: State) -> None:
    driver = state()
    driver.end("R")
    assert driver.finish("R") is FinishReason.ABORT
    driver.run()
    assert driver.finish("R") is FinishReason.ABORT


@in_every_state
def test_abort_frees_every_block_once(state: State) -> None:
    """The invariants are checked after every event; here the pool is empty at last."""
    driver = state()
    driver.end("R")
    for name in list(driver.core.requests):
        driver.end(name)
    driver.run()
    pool = driver.core.group.pool
    assert pool.num_held == 0
    driver.core.reset_prefix_cache()
    assert pool.num_scratch == pool.num_usable


@in_every_state
def test_abort_leaves_the_others_alone(state: State) -> None:
    driver = state()
    others = set(driver.core.requests) - {"R"}
    driver.end("R")
    driver.run()
    for name in others:
        assert driver.output(name) == driver.solo(name)


@in_every_state
def test_nothing_is_sent_after_the_end(state: State) -> None:
    driver = state()
    driver.end("R")
    num_deltas = len(driver.deltas["R"])
    driver.run()
    assert len(driver.deltas["R"]) == num_deltas


@in_every_state
def test_second_end_changes_nothing(state: State) -> None:
    driver = state()
    driver.end("R", EndReason.STOP)
    driver.end("R", EndReason.ABORT)
    assert driver.finish("R") is FinishReason.STOP
    assert len([delta for delta in driver.deltas["R"] if delta.finish]) == 1


@in_every_state
def test_workers_hear_of_the_end_only_if_they_have_the_table(state: State) -> None:
    driver = state()
    has_table = "R" in driver.running
    driver.end("R")
    driver.run()
    told = [close for plan in driver.plans if (close := closed(plan).get("R")) is not None]
    assert [close.reason for close in told].count(CloseReason.ABORTED) == has_table


# -- reasons and what is charged --------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "finish", "close"),
    [
        (EndReason.STOP, FinishReason.STOP, CloseReason.FINISHED),
        (EndReason.ABORT, FinishReason.ABORT, CloseReason.ABORTED),
        (EndReason.SLOW_CLIENT, FinishReason.ABORT, CloseReason.ABORTED),
    ],
)
def test_reason_of_the_end_reaches_client_and_workers(
    reason: EndReason, finish: FinishReason, close: CloseReason
) -> None:
    driver = running()
    driver.end("R", reason)
    assert driver.finish("R") is finish
    assert closed(driver.step())["R"].reason is close
    assert driver.core.accounting.finished == {finish: 1}


def test_stop_text_is_charged_up_to_its_last_token() -> None:
    driver = running()
    driver.steps(4)
    assert len(driver.output("R")) == 7
    driver.end("R", EndReason.STOP, num_output_tokens=5)
    assert driver.usage("R").completion_tokens == 5


def test_nobody_is_charged_for_tokens_that_were_not_sent() -> None:
    driver = running()
    driver.end("R", EndReason.STOP, num_output_tokens=50)
    assert driver.usage("R").completion_tokens == 3


def test_end_without_a_number_charges_what_was_sent() -> None:
    driver = running()
    driver.end("R")
    assert driver.usage("R").completion_tokens == 3


def test_late_result_of_an_ended_request_is_dropped() -> None:
    driver = in_flight()
    driver.end("R")
    driver.answer()
    driver.answer()
    assert driver.output("R") == []


# -- ends that overtake -----------------------------------------------------------------


def test_end_that_overtakes_its_submission_ends_it_at_once() -> None:
    driver = Driver(11)
    driver.end("R")
    driver.submit("R", text("r", 20), max_tokens=30)
    assert driver.finish("R") is FinishReason.ABORT
    assert driver.core.is_idle
    assert driver.plan() is None


def test_submission_repeated_after_an_overtaking_end_changes_nothing() -> None:
    driver = Driver(11)
    driver.end("R")
    driver.submit("R", text("r", 20), max_tokens=30)
    driver.submit("R", text("r", 20), max_tokens=30)
    assert driver.core.is_idle
    assert len(driver.deltas["R"]) == 1


@pytest.mark.parametrize(("seconds", "is_remembered"), [(0.0, True), (60.0, True), (60.5, False)])
def test_overtaking_end_is_remembered_for_a_minute(seconds: float, is_remembered: bool) -> None:
    driver = Driver(11)
    driver.now = 1000.0
    driver.end("R")
    driver.now += seconds
    driver.submit("R", text("r", 20), max_tokens=30)
    assert driver.core.is_idle == is_remembered


def test_overtaking_end_of_one_choice_leaves_the_others_of_its_call() -> None:
    driver = Driver(11)
    driver.end("R/1")
    sampling = SamplingParams(max_tokens=2, seed=0)
    driver.offer(*(request_of(f"R/{i}", text("r", 9), sampling) for i in range(3)))
    assert driver.waiting == ["R/0", "R/2"]
    assert driver.finish("R/1") is FinishReason.ABORT


def test_end_of_nobody_is_forgotten_in_time() -> None:
    driver = Driver(11)
    for i in range(1000):
        driver.now = float(i)
        driver.end(f"nobody {i}")
    assert len(driver.core._tombstones) <= 62


def test_what_a_client_that_was_gone_brings_again_gets_an_end_also_if_it_had_one() -> None:
    """The delta that told of the first end was lost with everything else on its way."""
    driver = Driver(11)
    driver.submit("R", text("r", 20), max_tokens=3)
    driver.run()
    assert driver.finish("R") is FinishReason.LENGTH
    driver.core.abandon("client", driver.now)
    driver.deltas.clear()
    driver.submit("R", text("r", 20), max_tokens=3)
    driver.run()
    assert driver.finish("R") is FinishReason.LENGTH


# -- ends from within -------------------------------------------------------------------


def test_error_of_one_request_ends_it_and_no_other() -> None:
    driver = Driver(11)
    driver.submit("R", text("r", 20), max_tokens=30)
    driver.submit("other", text("o", 20), max_tokens=30)
    plan = driver.plan()
    assert plan is not None
    result = driver.result_of(driver.in_flight.popleft())
    broken = SeqOutput(plan.work[0].seq, (), error="no finite probability")
    driver.deliver(StepResult(plan.epoch, plan.step_id, (broken, result.outputs[1])))
    assert driver.finish("R") is FinishReason.ERROR
    assert driver.deltas["R"][-1].error == "no finite probability"
    assert closed(driver.step())["R"].reason is CloseReason.ABORTED
    driver.run()
    assert driver.output("other") == driver.solo("other")


def test_error_that_arrives_after_a_preemption_ends_the_waiting_request() -> None:
    driver = preempted_in_flight()
    plan = driver.in_flight.popleft()
    seq = driver.request("R").ref
    driver.deliver(StepResult(plan.epoch, plan.step_id, (SeqOutput(seq, (), error="broken"),)))
    assert driver.finish("R") is FinishReason.ERROR
    assert driver.waiting == []


def test_several_requests_may_end_in_one_step() -> None:
    driver = Driver(11)
    for name in "ABCD":
        driver.submit(name, text(name, 20), max_tokens=2 if name in "AC" else 5)
    driver.steps(2)
    assert driver.running == ["B", "D"]
    assert set(closed(driver.step())) == {"A", "C"}


def test_token_of_the_same_result_after_an_end_is_not_sent() -> None:
    driver = Driver(11)
    driver.submit("R", text("r", 20), max_tokens=9, stop_token_ids=(7,))
    plan = driver.plan()
    assert plan is not None
    driver.in_flight.popleft()
    seq = plan.work[0].seq
    driver.deliver(StepResult(0, 0, (SeqOutput(seq, (7, 8)), SeqOutput(seq, (9,)))))
    assert driver.output("R") == [7]


def test_idle_core_holds_nothing() -> None:
    driver = Driver(11)
    for name in "ABC":
        driver.submit(name, text(name, 40), max_tokens=20)
    driver.run()
    assert driver.core.is_idle
    pool = driver.core.group.pool
    assert pool.num_held == 0
    driver.core.reset_prefix_cache()
    assert pool.num_scratch == pool.num_usable
    assert driver.plan() is None
    assert driver.core.take_batches() == {}


# -- batches ----------------------------------------------------------------------------


def test_every_client_gets_its_own_batch_and_each_delta_once() -> None:
    driver = Driver(11)
    sampling = SamplingParams(max_tokens=1, seed=0)
    for name, client in (("A", "left"), ("B", "right"), ("C", "left")):
        driver.core.submit([request_of(name, text("a", 5), sampling, client=client)], now=0.0)
    plan = driver.plan()
    assert plan is not None
    driver.core.apply(driver.result_of(plan), now=0.0)
    batches = driver.core.take_batches()
    told = {client: [d.request_id for d in batch.deltas] for client, batch in batches.items()}
    assert told == {"left": ["A", "C"], "right": ["B"]}
    assert {batch.step_id for batch in batches.values()} == {0}
    assert driver.core.take_batches() == {}
