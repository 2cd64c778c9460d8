"""The books on their own: what interruptions cost, and what was computed twice (SEMANTICS 5.6)."""

import pytest

from scheduler.accounting import Accounting, CauseTotals, DemandWindow, ScheduledTokens
from scheduler.histogram import Histogram
from scheduler.messages import FinishReason, InterruptionCause, SamplingParams
from scheduler.request import Request
from tests.support.drive import request_of, text

BLOCKS, LOST = InterruptionCause.BLOCKS, InterruptionCause.WORKER_LOST


def request(num_prompt_tokens: int = 40) -> Request:
    sampling = SamplingParams(max_tokens=50, seed=0)
    return Request.of(request_of("r", text("a", num_prompt_tokens), sampling), submit_index=0)


def settled(totals: CauseTotals) -> tuple[int, int, int, int]:
    """(held, recovered, recomputed, dropped)"""
    return (
        totals.held_tokens,
        totals.recovered_tokens,
        totals.recomputed_tokens,
        totals.dropped_tokens,
    )


# -- bills ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("held", "hit", "recovered", "recomputed"),
    [(40, 0, 0, 40), (40, 32, 32, 8), (32, 32, 32, 0), (20, 32, 20, 0), (0, 16, 0, 0)],
    ids=["all lost", "partial block lost", "all found", "others had more", "had nothing"],
)
def test_bill_is_booked_at_readmission(
    held: int, hit: int, recovered: int, recomputed: int
) -> None:
    accounting, made = Accounting(), request()
    accounting.interrupted(made, BLOCKS, held, now=0.0, step=0)
    accounting.admitted(made, hit, counts_lookup=True)
    assert settled(accounting.by_cause[BLOCKS]) == (held, recovered, recomputed, 0)
    assert (made.recovered_tokens, made.recomputed_tokens) == (recovered, recomputed)
    assert made.bill is None


def test_request_that_ends_before_it_resumes_drops_what_it_held() -> None:
    accounting, made = Accounting(), request()
    accounting.interrupted(made, BLOCKS, 40, now=0.0, step=0)
    accounting.ended(made, FinishReason.ABORT)
    assert settled(accounting.by_cause[BLOCKS]) == (40, 0, 0, 40)


def test_bill_goes_to_the_cause_of_its_own_interruption() -> None:
    accounting, made = Accounting(), request()
    for cause, held in ((BLOCKS, 40), (LOST, 41)):
        accounting.interrupted(made, cause, held, now=0.0, step=0)
        accounting.admitted(made, 16, counts_lookup=True)
    assert settled(accounting.by_cause[BLOCKS]) == (40, 16, 24, 0)
    assert settled(accounting.by_cause[LOST]) == (41, 16, 25, 0)
    assert made.causes == {BLOCKS: 1, LOST: 1}


def test_first_lookup_and_resume_lookup_are_counted_apart() -> None:
    accounting, made = Accounting(), request(40)
    accounting.admitted(made, 16, counts_lookup=True)
    accounting.interrupted(made, BLOCKS, 40, now=0.0, step=0)
    accounting.admitted(made, 32, counts_lookup=True)
    totals = accounting.by_cause[BLOCKS]
    assert (accounting.queries_tokens, accounting.hits_tokens) == (40, 16)
    assert (totals.resume_queries_tokens, totals.resume_hits_tokens) == (40, 32)
    assert made.cached_tokens == 16


def test_lookup_that_does_not_count_leaves_the_counters() -> None:
    accounting, made = Accounting(), request()
    accounting.admitted(made, 0, counts_lookup=False)
    accounting.interrupted(made, BLOCKS, 40, now=0.0, step=0)
    accounting.admitted(made, 0, counts_lookup=False)
    totals = accounting.by_cause[BLOCKS]
    assert (accounting.queries_tokens, totals.resume_queries_tokens) == (0, 0)
    assert totals.resumed_requests == 1


# -- stalls -----------------------------------------------------------------------------


def test_stall_lasts_from_the_interruption_to_the_next_token() -> None:
    accounting, made = Accounting(), request()
    accounting.interrupted(made, BLOCKS, 40, now=10.0, step=100)
    accounting.admitted(made, 0, counts_lookup=True)
    accounting.stall_ended(made, now=12.5, step=103)
    totals = accounting.by_cause[BLOCKS]
    assert (totals.stall_seconds.count, totals.stall_seconds.sum) == (1, 2.5)
    assert totals.stalled_steps == 3
    assert made.stalled_seconds == 2.5


def test_interruption_during_a_stall_extends_it() -> None:
    """The client sees one pause, and the cause that began it gets the time."""
    accounting, made = Accounting(), request()
    accounting.interrupted(made, BLOCKS, 40, now=10.0, step=0)
    accounting.admitted(made, 0, counts_lookup=True)
    accounting.interrupted(made, LOST, 16, now=11.0, step=1)
    accounting.admitted(made, 0, counts_lookup=True)
    accounting.stall_ended(made, now=14.0, step=4)
    assert accounting.by_cause[BLOCKS].stall_seconds.sum == 4.0
    assert accounting.by_cause[LOST].stall_seconds.count == 0


# -- single bills -----------------------------------------------------------------------


def test_each_preemption_keeps_a_bill_of_its_own() -> None:
    accounting, made = Accounting(), request()
    accounting.interrupted(made, BLOCKS, 40, now=10.0, step=0)
    accounting.admitted(made, 32, counts_lookup=True)
    accounting.interrupted(made, LOST, 36, now=11.0, step=1)
    first, second = accounting.bills
    assert (first.recovered_tokens, first.recomputed_tokens) == (32, 8)
    assert (second.cause, second.held_tokens, second.stalled_seconds) == (LOST, 36, None)
    accounting.admitted(made, 0, counts_lookup=True)
    accounting.stall_ended(made, now=14.0, step=4)
    assert (first.stalled_seconds, first.stalled_steps) == (4.0, 4)
    assert (second.stalled_seconds, second.stalled_steps) == (3.0, 3)


def test_bill_of_a_request_that_ends_first_is_dropped_and_has_no_next_token() -> None:
    accounting, made = Accounting(), request()
    accounting.interrupted(made, BLOCKS, 40, now=0.0, step=0)
    accounting.ended(made, FinishReason.ABORT)
    (bill,) = accounting.bills
    assert (bill.request_id, bill.dropped_tokens, bill.stalled_seconds) == ("r", 40, None)


def test_only_the_last_bills_are_kept() -> None:
    accounting, made = Accounting(), request()
    for i in range(3000):
        accounting.interrupted(made, BLOCKS, i, now=0.0, step=0)
        accounting.admitted(made, 0, counts_lookup=True)
    assert len(accounting.bills) == 1024
    assert accounting.bills[-1].held_tokens == 2999


# -- work -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "end", "kinds"),
    [
        (0, 40, (40, 0, 0)),
        (30, 50, (10, 10, 0)),
        (40, 41, (0, 1, 0)),
    ],
    ids=["prompt", "over the edge", "output"],
)
def test_fresh_work_is_prompt_or_output(start: int, end: int, kinds: tuple[int, int, int]) -> None:
    tokens = ScheduledTokens()
    tokens.add(request(40), start, end)
    assert (tokens.prompt, tokens.output, tokens.recompute) == kinds


@pytest.mark.parametrize(
    ("start", "end", "kinds"),
    [
        (0, 45, (0, 0, 45)),
        (40, 60, (0, 10, 10)),
        (0, 60, (0, 10, 50)),
        (50, 51, (0, 1, 0)),
    ],
)
def test_work_below_the_high_water_is_done_twice(
    start: int, end: int, kinds: tuple[int, int, int]
) -> None:
    made = request(40)
    made.high_water = 50
    tokens = ScheduledTokens()
    tokens.add(made, start, end)
    assert (tokens.prompt, tokens.output, tokens.recompute) == kinds
    assert tokens.total == end - start


def test_prompt_interrupted_half_way_is_recomputed_half_and_new_half() -> None:
    made = request(40)
    made.high_water = 24
    tokens = ScheduledTokens()
    tokens.add(made, 0, 40)
    assert (tokens.prompt, tokens.output, tokens.recompute) == (16, 0, 24)


def test_high_water_does_not_fall_when_a_resume_is_interrupted_early() -> None:
    accounting, made = Accounting(), request(40)
    for held in (45, 16):
        accounting.interrupted(made, BLOCKS, held, now=0.0, step=0)
        accounting.admitted(made, 0, counts_lookup=True)
    accounting.scheduled_tokens.add(made, 16, 46)
    assert accounting.scheduled_tokens.recompute == 29
    assert accounting.scheduled_tokens.output == 1


def test_work_taken_back_leaves_no_trace() -> None:
    made = request(40)
    made.high_water = 20
    tokens = ScheduledTokens()
    tokens.add(made, 10, 50)
    tokens.add(made, 10, 50, sign=-1)
    assert tokens == ScheduledTokens()


# -- demand -----------------------------------------------------------------------------


def test_no_demand_without_preemptions() -> None:
    assert DemandWindow().num_blocks(now=0.0) == 0


def test_demand_is_the_highest_of_the_last_five_minutes() -> None:
    window = DemandWindow()
    for now, num_blocks in ((0.0, 30), (100.0, 50), (200.0, 20), (250.0, 40)):
        window.note(num_blocks, now)
    asked = {now: window.num_blocks(now) for now in (250.0, 400.0, 401.0, 550.0, 551.0)}
    assert asked == {250.0: 50, 400.0: 50, 401.0: 40, 550.0: 40, 551.0: 0}


def test_demand_keeps_no_history() -> None:
    window = DemandWindow()
    for step in range(1000):
        window.note(step % 7, now=step / 1000)
    assert len(window._peaks) <= 7


# -- ends -------------------------------------------------------------------------------


def test_ends_are_counted_by_reason_with_the_preemptions_of_each_request() -> None:
    accounting = Accounting()
    for reason, num_preemptions in (
        (FinishReason.STOP, 0),
        (FinishReason.STOP, 2),
        (FinishReason.ABORT, 1),
    ):
        made = request()
        for _ in range(num_preemptions):
            accounting.interrupted(made, BLOCKS, 0, now=0.0, step=0)
        accounting.ended(made, reason)
    assert accounting.finished == {FinishReason.STOP: 2, FinishReason.ABORT: 1}
    assert accounting.request_preemptions.count == 3
    assert accounting.request_preemptions.sum == 3


# -- histograms -------------------------------------------------------------------------


def test_bounds_of_a_histogram_are_inclusive_and_one_bucket_takes_the_rest() -> None:
    histogram = Histogram([1, 2, 4])
    for value in (0, 1, 1.5, 2, 4, 5, 100):
        histogram.observe(value)
    assert histogram.bucket_counts == [2, 2, 1, 2]
    assert (histogram.count, histogram.sum) == (7, 113.5)


def test_histograms_share_nothing() -> None:
    a, b = Histogram.of_counts(), Histogram.of_counts()
    a.observe(1)
    assert b.count == 0
