"""What clients and metrics are told: usage, stalls, counters (SEMANTICS 5.6, METRICS)."""

from scheduler.messages import FinishReason, InterruptionCause, Usage
from tests.support.drive import Driver, text

BLOCKS = InterruptionCause.BLOCKS


def run_dry() -> Driver:
    """B, with three tokens sent, loses its blocks to A in the third step, at 3 seconds."""
    driver = Driver(5)
    driver.submit("A", text("a", 31), max_tokens=30)
    driver.submit("B", text("b", 31), max_tokens=30)
    driver.steps(3)
    assert driver.waiting == ["B"]
    return driver


# -- usage on deltas --------------------------------------------------------------------


def test_usage_comes_with_the_first_token_and_at_the_end() -> None:
    driver = Driver(11)
    driver.submit("R", text("r", 20), max_tokens=4)
    driver.run()
    assert [delta.usage for delta in driver.deltas["R"]] == [
        Usage(20, 1, 0),
        None,
        None,
        Usage(20, 4, 0),
    ]


def test_usage_comes_with_the_first_token_after_an_interruption() -> None:
    """So that an ingress always knows what a continuation must carry."""
    driver = run_dry()
    driver.run()
    told = [delta.usage is not None for delta in driver.deltas["B"]]
    assert told == [True, False, True, *[False] * 26, True]
    resumed = driver.deltas["B"][2].usage
    assert resumed is not None
    assert resumed.interruptions is not None
    assert resumed.interruptions.count == 1


def test_usage_without_an_interruption_does_not_mention_any() -> None:
    driver = run_dry()
    driver.run()
    assert driver.usage("A") == Usage(31, 30, 0)


def test_cached_tokens_are_the_hit_of_the_first_admission() -> None:
    driver = Driver(20)
    driver.submit("before", text("r", 64))
    driver.run()
    driver.submit("R", text("r", 64), max_tokens=9)
    driver.step()
    driver.lose_group()
    driver.run()
    assert driver.usage("R").cached_tokens == 48


def test_logprobs_come_one_per_token() -> None:
    driver = Driver(11)
    driver.submit("R", text("r", 20), max_tokens=4, logprobs=0)
    driver.submit("without", text("w", 20), max_tokens=4)
    driver.run()
    assert [len(delta.logprobs) for delta in driver.deltas["R"]] == [1, 1, 1, 1]
    assert [len(delta.logprobs) for delta in driver.deltas["without"]] == [0, 0, 0, 0]


# -- stalls -----------------------------------------------------------------------------


def test_stall_lasts_from_the_interruption_to_the_next_token() -> None:
    driver = run_dry()
    while len(driver.output("B")) == 2:
        driver.step()
    stalled_seconds = driver.now - 3.0
    interruptions = driver.usage("B").interruptions
    assert interruptions is not None
    assert interruptions.stalled_seconds == stalled_seconds
    totals = driver.core.accounting.by_cause[BLOCKS]
    assert (totals.stall_seconds.count, totals.stall_seconds.sum) == (1, stalled_seconds)
    assert totals.stalled_steps == stalled_seconds


def test_token_under_way_at_the_interruption_does_not_end_the_stall() -> None:
    driver = Driver(5, steps_in_flight=2)
    driver.submit("A", text("a", 31), max_tokens=30)
    driver.submit("B", text("b", 32), max_tokens=30)
    driver.plan()
    driver.plan()
    driver.now = 5.0
    driver.answer()
    assert len(driver.output("B")) == 1
    assert driver.core.accounting.by_cause[BLOCKS].stall_seconds.count == 0
    driver.run()
    usage = driver.usage("B")
    assert usage.interruptions is not None
    assert usage.interruptions.stalled_seconds > 5.0


def test_usage_is_due_again_after_a_token_that_arrived_while_waiting() -> None:
    driver = Driver(5, steps_in_flight=2)
    driver.submit("A", text("a", 31), max_tokens=30)
    driver.submit("B", text("b", 32), max_tokens=30)
    driver.plan()
    driver.plan()
    driver.answer()
    driver.run()
    assert [delta.usage is not None for delta in driver.deltas["B"]][:3] == [True, True, False]


def test_request_that_ends_in_its_stall_ends_no_stall() -> None:
    driver = run_dry()
    driver.end("B")
    assert driver.core.accounting.by_cause[BLOCKS].stall_seconds.count == 0


# -- counters ---------------------------------------------------------------------------


def test_queue_tells_new_and_interrupted_requests_apart() -> None:
    driver = run_dry()
    driver.submit("new", text("n", 5))
    waiting = driver.core.waiting
    assert (len(waiting), waiting.num_interrupted) == (2, 1)
    driver.run()
    assert (len(waiting), waiting.num_interrupted) == (0, 0)


def test_resumed_requests_are_counted_by_cause() -> None:
    driver = run_dry()
    driver.lose_group()
    driver.run()
    by_cause = driver.core.accounting.by_cause
    assert by_cause[BLOCKS].resumed_requests == 1
    assert by_cause[InterruptionCause.WORKER_LOST].resumed_requests == 1


def test_preemptions_per_request_tell_everyone_once_from_one_many_times() -> None:
    driver = run_dry()
    driver.run()
    histogram = driver.core.accounting.request_preemptions
    assert (histogram.count, histogram.sum) == (2, 1)
    assert histogram.bucket_counts[:2] == [1, 1]


def test_finished_requests_are_counted_by_reason() -> None:
    driver = run_dry()
    driver.end("B")
    driver.run()
    assert driver.core.accounting.finished == {FinishReason.LENGTH: 1, FinishReason.ABORT: 1}


# -- demand -----------------------------------------------------------------------------


def test_without_a_preemption_there_is_no_demand() -> None:
    driver = Driver(11)
    driver.submit("A", text("a", 100), max_tokens=30)
    driver.run()
    assert driver.core.accounting.demand.num_blocks(driver.now) == 0


def test_demand_is_what_was_held_and_what_was_missing_and_the_null_block() -> None:
    """Four blocks were held, and both needed one more in that step."""
    driver = run_dry()
    assert driver.core.accounting.demand.num_blocks(driver.now) == 4 + 2 + 1


def test_demand_counts_the_waiting_as_far_as_there_are_slots_for_them() -> None:
    """Two wait with 32 tokens each, and of 3 slots one is free: half of their 64 tokens."""
    driver = Driver(5, max_num_seqs=3)
    driver.submit("A", text("a", 31), max_tokens=30)
    driver.submit("B", text("b", 31), max_tokens=30)
    driver.steps(2)
    driver.submit("C", text("c", 32))
    driver.submit("D", text("d", 32))
    driver.step()
    assert driver.waiting == ["B", "C", "D"]
    assert driver.core.accounting.demand.num_blocks(driver.now) == 4 + 2 + 2 + 1


def test_demand_is_forgotten_after_five_minutes() -> None:
    driver = run_dry()
    assert driver.core.accounting.demand.num_blocks(driver.now + 299) == 7
    assert driver.core.accounting.demand.num_blocks(driver.now + 301) == 0


def test_pool_of_the_size_demanded_avoids_the_preemption_of_that_step() -> None:
    driver = run_dry()
    num_blocks = driver.core.accounting.demand.num_blocks(driver.now)
    larger = Driver(num_blocks)
    larger.submit("A", text("a", 31), max_tokens=30)
    larger.submit("B", text("b", 31), max_tokens=30)
    larger.steps(3)
    assert larger.waiting == []
