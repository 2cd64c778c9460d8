"""A group is lost, or its pool changes its size: one path for all causes (SEMANTICS 5.7, 5.9)."""

import pytest

from scheduler.block_pool import AllBlocksCleared
from scheduler.errors import ProtocolError
from scheduler.messages import (
    EndReason,
    FinishReason,
    InterruptionCause,
    NeverFits,
    SamplingParams,
    StepResult,
)
from tests.support.drive import Driver, opened, request_of, scheduled, text

LOST = InterruptionCause.WORKER_LOST


def test_running_requests_go_to_the_front_in_their_running_order() -> None:
    driver = Driver(40, max_num_seqs=3)
    for name in "ABCDE":
        driver.submit(name, text(name, 10), max_tokens=30)
    driver.steps(3)
    driver.lose_group()
    assert driver.running == []
    assert driver.waiting == ["A", "B", "C", "D", "E"]


def test_running_requests_go_before_those_preempted_earlier() -> None:
    driver = Driver(5)
    driver.submit("A", text("a", 31), max_tokens=30)
    driver.submit("B", text("b", 31), max_tokens=30)
    driver.steps(3)
    assert driver.waiting == ["B"]
    driver.lose_group()
    assert driver.waiting == ["A", "B"]


def test_under_priority_they_go_to_their_places() -> None:
    driver = Driver(40, max_num_seqs=2, policy="priority", slot_preemption=False)
    driver.submit("A", text("a", 10), max_tokens=30, priority=3)
    driver.submit("B", text("b", 10), max_tokens=30, priority=3)
    driver.step()
    driver.submit("urgent", text("c", 10), priority=1)
    driver.submit("equal", text("d", 10), priority=3, arrival=-1.0)
    driver.lose_group()
    assert driver.waiting == ["urgent", "A", "B", "equal"]


def test_new_epoch_counts_its_steps_from_0() -> None:
    driver = Driver(11)
    driver.submit("A", text("a", 10), max_tokens=30)
    driver.steps(5)
    driver.lose_group()
    plan = driver.step()
    assert plan is not None
    assert (plan.epoch, plan.step_id) == (1, 0)


def test_new_epoch_starts_with_an_empty_map() -> None:
    driver = Driver(11)
    driver.submit("A", text("a", 40), max_tokens=30)
    driver.steps(5)
    driver.lose_group()
    assert opened(driver.step())["A"].num_computed == 0


def test_new_group_hears_nothing_of_old_tables() -> None:
    driver = Driver(11)
    driver.submit("A", text("a", 10), max_tokens=30)
    driver.submit("B", text("b", 10), max_tokens=30)
    driver.steps(3)
    driver.end("A")
    driver.lose_group()
    plan = driver.step()
    assert plan is not None
    assert [type(update).__name__ for update in plan.updates] == ["Open"]


def test_results_of_the_old_epoch_are_ignored() -> None:
    driver = Driver(11, steps_in_flight=2)
    driver.submit("A", text("a", 10), max_tokens=5)
    driver.step()
    lost = driver.lose_group()
    assert len(lost) == 1
    for plan in lost:
        driver.deliver(driver.result_of(plan))
    assert driver.output("A") == driver.solo("A")[:1]
    driver.run()
    assert driver.output("A") == driver.solo("A")


def test_result_of_an_epoch_that_has_not_begun_is_an_error() -> None:
    driver = Driver(11)
    with pytest.raises(ProtocolError, match="epoch 1 in epoch 0"):
        driver.deliver(StepResult(1, 0, ()))


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
def test_nothing_is_repeated_lost_or_changed_for_the_client(steps_in_flight: int) -> None:
    driver = Driver(20, steps_in_flight=steps_in_flight, max_num_batched_tokens=30)
    for name in "ABCD":
        driver.submit(name, text(name, 35), max_tokens=25)
    while driver.core.requests:
        driver.steps(5)
        driver.lose_group()
    for name in "ABCD":
        assert driver.output(name) == driver.solo(name)
        assert driver.finish(name) is FinishReason.LENGTH


def test_loss_is_billed_to_its_cause() -> None:
    driver = Driver(11)
    driver.submit("A", text("a", 40), max_tokens=30)
    driver.steps(3)
    driver.lose_group(cause=InterruptionCause.DRAIN)
    driver.run()
    totals = driver.core.accounting.by_cause[InterruptionCause.DRAIN]
    assert (totals.preemptions, totals.held_tokens) == (1, 42)
    assert (totals.recovered_tokens, totals.recomputed_tokens) == (0, 42)
    interruptions = driver.usage("A").interruptions
    assert interruptions is not None
    assert interruptions.causes == {InterruptionCause.DRAIN: 1}


def test_output_computed_again_in_chunks_is_recompute() -> None:
    driver = Driver(11, max_num_batched_tokens=16)
    driver.submit("A", text("a", 20), max_tokens=60)
    driver.steps(50)
    driver.lose_group()
    held = driver.core.accounting.by_cause[LOST].held_tokens
    assert held > 60
    driver.run()
    tokens = driver.core.accounting.scheduled_tokens
    assert (tokens.recompute, tokens.prompt, tokens.output) == (held, 20, 59)


def test_waiting_request_is_not_interrupted_again() -> None:
    driver = Driver(11)
    driver.submit("A", text("a", 40), max_tokens=30)
    driver.steps(3)
    driver.lose_group()
    driver.lose_group()
    assert driver.core.accounting.by_cause[LOST].preemptions == 1
    driver.run()
    assert driver.output("A") == driver.solo("A")


def test_stall_over_a_loss_is_counted_in_steps_of_both_epochs() -> None:
    """Step ids begin again, and a counter must not fall for that."""
    driver = Driver(11)
    driver.submit("A", text("a", 40), max_tokens=30)
    driver.steps(10)
    driver.lose_group()
    driver.run()
    totals = driver.core.accounting.by_cause[LOST]
    assert totals.stalled_steps == 0
    assert totals.stall_seconds.count == 1


def test_stall_that_began_before_a_loss_counts_the_steps_since() -> None:
    driver = Driver(5)
    driver.submit("A", text("a", 31), max_tokens=30)
    driver.submit("B", text("b", 31), max_tokens=30)
    driver.steps(2)
    assert driver.waiting == []
    driver.steps(4)  # in the first of which B is preempted
    driver.lose_group()
    driver.end("A")
    driver.steps(2)
    assert driver.core.accounting.by_cause[InterruptionCause.BLOCKS].stalled_steps == 4


def test_mirror_of_the_prefix_map_hears_that_all_is_gone() -> None:
    driver = Driver(11, record_cache_events=True)
    driver.submit("A", text("a", 40), max_tokens=30)
    driver.steps(3)
    driver.lose_group()
    assert driver.core.take_cache_events() == [AllBlocksCleared()]
    assert driver.core.take_cache_events() == []


def test_evictions_are_counted_over_all_epochs() -> None:
    driver = Driver(3)
    for name in "AB":
        driver.submit(name, text(name, 32))
        driver.run()
    driver.lose_group()
    assert driver.core.accounting.evictions.count == 2


# -- another size -----------------------------------------------------------------------


def shrunk(num_output_steps: int, num_blocks: int, *, ignore_eos: bool = False) -> Driver:
    """A prompt of 100 in a pool of 160 with some tokens sent, then the pool shrinks."""
    driver = Driver(11, max_num_batched_tokens=512)
    driver.submit("A", text("a", 100), max_tokens=40, ignore_eos=ignore_eos)
    driver.steps(num_output_steps)
    driver.lose_group(num_blocks=num_blocks, cause=InterruptionCause.RESIZE)
    return driver


def test_request_that_still_fits_goes_on() -> None:
    driver = shrunk(3, 10)
    driver.run()
    assert driver.output("A") == driver.solo("A")


def test_pool_of_a_group_that_never_stood_ends_nobody() -> None:
    driver = Driver(11)
    driver.submit("A", text("a", 100), max_tokens=40)
    driver.steps(3)
    driver.lose_group(cause=InterruptionCause.RESIZE)
    core = driver.core
    for num_blocks in (2, 11):
        core.begin_epoch(core.group.epoch + 1, num_blocks)
    core.fit(driver.now)
    driver.run()
    assert driver.output("A") == driver.solo("A")


def test_request_that_fits_for_now_is_clamped_again() -> None:
    driver = shrunk(3, 8)
    driver.run()
    assert driver.output("A") == driver.solo("A")[: 112 + 1 - 100]
    assert driver.finish("A") is FinishReason.LENGTH


def test_request_that_no_longer_fits_ends_with_length_if_it_has_sent_tokens() -> None:
    driver = shrunk(3, 5)
    assert driver.finish("A") is FinishReason.LENGTH
    assert driver.output("A") == driver.solo("A")[:3]
    assert driver.core.is_idle


def test_request_that_no_longer_fits_and_sent_nothing_ends_with_an_error() -> None:
    """Not with `length` and an empty answer; the error names the new capacity."""
    driver = shrunk(0, 5)
    assert driver.finish("A") is FinishReason.ERROR
    error = driver.deltas["A"][-1].error
    assert error is not None
    assert "100 tokens" in error
    assert "64" in error
    assert driver.core.is_idle


def test_prompt_of_one_token_too_many_does_not_block_the_queue() -> None:
    driver = Driver(11)
    driver.submit("A", text("a", 65), max_tokens=40)
    driver.submit("B", text("b", 64), max_tokens=40)
    driver.lose_group(num_blocks=5)
    assert driver.finish("A") is FinishReason.ERROR
    driver.run()
    assert driver.output("B") == driver.solo("B")[:1]
    assert driver.finish("B") is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("num_steps", "finish"), [(0, FinishReason.ERROR), (3, FinishReason.LENGTH)]
)
def test_ignore_eos_that_would_be_clamped_ends(num_steps: int, finish: FinishReason) -> None:
    driver = shrunk(num_steps, 8, ignore_eos=True)
    assert driver.finish("A") is finish
    assert (driver.deltas["A"][-1].error is not None) == (finish is FinishReason.ERROR)


def test_request_refused_before_may_fit_into_a_larger_pool() -> None:
    driver = Driver(5)
    message = request_of("A", text("a", 100), SamplingParams(max_tokens=5, seed=0))
    assert isinstance(driver.offer(message), NeverFits)
    driver.lose_group(num_blocks=11, cause=InterruptionCause.RESIZE)
    driver.offer(message)
    driver.run()
    assert driver.output("A") == driver.solo("A")


def test_larger_pool_lifts_the_clamp() -> None:
    driver = Driver(8)
    driver.submit("A", text("a", 100), max_tokens=40)
    driver.steps(3)
    driver.lose_group(num_blocks=20, cause=InterruptionCause.RESIZE)
    driver.run()
    assert driver.output("A") == driver.solo("A")


def test_pool_of_the_new_size_is_used() -> None:
    driver = Driver(11)
    driver.lose_group(num_blocks=30)
    assert driver.core.group.pool.num_usable == 29
    driver.submit("A", text("a", 400))
    assert scheduled(driver.step()) == {"A": 400}


def test_end_from_outside_works_between_the_epochs() -> None:
    driver = Driver(11)
    driver.submit("A", text("a", 40), max_tokens=30)
    driver.steps(3)
    driver.lose_group()
    driver.end("A", EndReason.ABORT)
    assert driver.finish("A") is FinishReason.ABORT
    assert driver.core.is_idle
