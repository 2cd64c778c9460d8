"""One step at a time: budget, chunks, slots, and what the workers are told (SEMANTICS 4)."""

import pytest

from scheduler.messages import CloseReason, SeqWork, unpack_token_ids
from tests.support.drive import Driver, closed, extended, opened, scheduled, text


def start_running(driver: Driver, *names: str, num_tokens: int = 10) -> None:
    for name in names:
        driver.submit(name, text(name, num_tokens), max_tokens=100)
    driver.step()


# -- budget -----------------------------------------------------------------------------


def test_nothing_to_do_is_no_plan() -> None:
    assert Driver(11).plan() is None


def test_prompts_and_next_tokens_share_one_step() -> None:
    driver = Driver(20)
    start_running(driver, "A")
    driver.submit("B", text("b", 20))
    assert scheduled(driver.step()) == {"A": 1, "B": 20}


def test_running_requests_are_served_before_waiting_ones() -> None:
    driver = Driver(20, max_num_batched_tokens=12)
    start_running(driver, "A", num_tokens=12)
    driver.submit("B", text("b", 20))
    assert scheduled(driver.step()) == {"A": 1, "B": 11}


def test_running_requests_are_served_in_the_order_of_admission() -> None:
    driver = Driver(20, max_num_batched_tokens=6)
    driver.submit("A", text("a", 6), max_tokens=9)
    driver.submit("B", text("b", 20), max_tokens=9)
    driver.submit("C", text("c", 20), max_tokens=9)
    assert [list(scheduled(plan).items()) for plan in driver.steps(6)] == [
        [("A", 6)],
        *[[("A", 1), ("B", 5)]] * 4,
        [("A", 1), ("B", 1), ("C", 4)],
    ]


def test_long_prompt_is_computed_over_several_steps() -> None:
    driver = Driver(20, max_num_batched_tokens=16)
    driver.submit("A", text("a", 40), max_tokens=2)
    plans = driver.steps(4)
    assert [scheduled(plan).get("A") for plan in plans] == [16, 16, 8, 1]


def test_only_the_last_chunk_samples() -> None:
    driver = Driver(20, max_num_batched_tokens=16)
    driver.submit("A", text("a", 40), max_tokens=2)
    works = [plan.work[0] for plan in driver.steps(4) if plan is not None]
    assert [(work.start, work.sample) for work in works] == [
        (0, False),
        (16, False),
        (32, True),
        (40, True),
    ]


def test_step_never_exceeds_its_budget() -> None:
    driver = Driver(60, max_num_batched_tokens=37)
    for name in "ABCDEF":
        driver.submit(name, text(name, 50), max_tokens=20)
    driver.run()
    sums = [sum(scheduled(plan).values()) for plan in driver.plans]
    assert max(sums) == 37


def test_threshold_is_off_for_a_request_that_is_alone() -> None:
    driver = Driver(60, long_prefill_token_threshold=30)
    driver.submit("A", text("a", 100))
    assert scheduled(driver.step()) == {"A": 100}


def test_threshold_holds_as_soon_as_somebody_waits() -> None:
    driver = Driver(60, long_prefill_token_threshold=30, max_num_seqs=1)
    driver.submit("A", text("a", 100))
    driver.submit("B", text("b", 10))
    assert scheduled(driver.step()) == {"A": 30}


def test_threshold_holds_for_running_and_for_waiting_requests() -> None:
    driver = Driver(60, long_prefill_token_threshold=30)
    driver.submit("A", text("a", 100))
    driver.submit("B", text("b", 50))
    assert [scheduled(plan) for plan in driver.steps(2)] == [
        {"A": 30, "B": 30},
        {"A": 30, "B": 20},
    ]


# -- admission --------------------------------------------------------------------------


def test_no_more_than_max_num_seqs_run() -> None:
    driver = Driver(40, max_num_seqs=2)
    start_running(driver, "A", "B", "C")
    assert driver.running == ["A", "B"]
    assert driver.waiting == ["C"]


def test_nobody_is_admitted_in_a_step_in_which_somebody_was_preempted() -> None:
    """Even if the new one would fit into the freed blocks."""
    driver = Driver(5)
    driver.submit("A", text("a", 31), max_tokens=50)
    driver.submit("B", text("b", 31), max_tokens=50)
    driver.steps(2)
    driver.submit("C", text("c", 5))
    plan = driver.step()
    assert list(closed(plan)) == ["B"]
    assert scheduled(plan) == {"A": 1}
    assert driver.waiting == ["B", "C"]


def test_nobody_overtakes_a_request_that_does_not_fit() -> None:
    driver = Driver(11)
    start_running(driver, "A", num_tokens=100)
    driver.submit("large", text("b", 80))
    driver.submit("small", text("c", 5))
    assert scheduled(driver.step()) == {"A": 1}
    assert driver.waiting == ["large", "small"]


def test_long_prompt_does_not_start_what_it_cannot_finish() -> None:
    """Its first chunk would fit."""
    driver = Driver(11, max_num_batched_tokens=20)
    start_running(driver, "A", num_tokens=20)
    driver.submit("B", text("b", 150))
    assert scheduled(driver.step()) == {"A": 1}


def test_request_without_chunks_waits_for_a_budget_of_its_own_size() -> None:
    driver = Driver(60, max_num_batched_tokens=100, max_model_len=100, enable_chunked_prefill=False)
    driver.submit("A", text("a", 60), max_tokens=3)
    driver.submit("B", text("b", 60), max_tokens=3)
    assert [scheduled(plan) for plan in driver.steps(2)] == [{"A": 60}, {"A": 1, "B": 60}]


def test_computed_advances_when_the_plan_is_made() -> None:
    driver = Driver(11)
    driver.submit("A", text("a", 20))
    driver.plan()
    assert driver.request("A").num_computed == 20


# -- the last token ---------------------------------------------------------------------


def test_last_token_is_never_computed() -> None:
    """Nobody reads its KV: a prompt of 10 with 3 tokens of output fills 12 slots."""
    driver = Driver(11)
    driver.submit("A", text("a", 10), max_tokens=3)
    driver.run()
    assert sum(scheduled(plan).get("A", 0) for plan in driver.plans) == 12


def test_request_that_fills_its_blocks_to_the_last_slot_takes_no_more() -> None:
    driver = Driver(2)
    driver.submit("A", text("a", 10), max_tokens=7)
    driver.run()
    assert driver.output("A") == driver.solo("A")
    assert len(driver.output("A")) == 7


# -- the wire ---------------------------------------------------------------------------


def test_open_carries_everything_a_worker_needs() -> None:
    driver = Driver(11)
    driver.submit("A", text("a", 20), max_tokens=9, seed=5, min_tokens=2)
    (update,) = opened(driver.plan()).values()
    assert list(unpack_token_ids(update.token_ids)) == text("a", 20)
    assert (update.num_prompt_tokens, update.num_computed, update.block_ids) == (20, 0, (1, 2))
    assert (update.sampling.seed, update.sampling.min_tokens) == (5, 2)
    assert update.seq.attempt == 1


def test_table_is_extended_only_in_steps_in_which_it_grows() -> None:
    driver = Driver(11)
    driver.submit("A", text("a", 30), max_tokens=20)
    grown = [list(extended(plan).values()) for plan in driver.steps(5)]
    assert [len(updates) for updates in grown] == [0, 0, 0, 1, 0]
    assert (grown[3][0].block_ids, grown[3][0].token_ids) == ((3,), ())


def test_close_of_a_finished_table_goes_out_with_the_next_plan() -> None:
    driver = Driver(11)
    driver.submit("A", text("a", 10))
    driver.submit("B", text("b", 10), max_tokens=3)
    driver.step()
    (close,) = closed(driver.step()).values()
    assert (close.seq.request_id, close.reason) == ("A", CloseReason.FINISHED)


def test_plan_of_updates_only_is_published_too() -> None:
    driver = Driver(11)
    driver.submit("A", text("a", 10))
    driver.step()
    plan = driver.step()
    assert plan is not None
    assert list(closed(plan)) == ["A"]
    assert plan.work == ()
    assert driver.plan() is None
    assert driver.core.is_idle


def test_tables_are_closed_before_others_are_opened() -> None:
    """The blocks of the one may already be in the other."""
    driver = Driver(3)
    driver.submit("A", text("a", 20))
    driver.step()
    driver.submit("B", text("b", 20))
    plan = driver.step()
    assert plan is not None
    assert [type(update).__name__ for update in plan.updates] == ["Close", "Open"]
    assert set(opened(plan)["B"].block_ids) == {1, 2}


def test_start_says_where_the_worker_must_stand() -> None:
    driver = Driver(20)
    driver.submit("A", text("a", 40))
    driver.run()
    driver.submit("B", [*text("a", 32), *text("b", 10)], max_tokens=2)
    first, second = driver.steps(2)
    assert first is not None
    assert second is not None
    seq = driver.plans[-1].work[0].seq
    assert first.work == (SeqWork(seq, 32, 10, sample=True),)
    assert second.work == (SeqWork(seq, 42, 1, sample=True),)


def test_step_ids_are_consecutive_and_idle_turns_use_none() -> None:
    driver = Driver(11)
    for name in ("A", "B"):
        driver.submit(name, text(name, 5), max_tokens=3)
        driver.run()
        driver.steps(3)
    assert [plan.step_id for plan in driver.plans] == list(range(len(driver.plans)))


# -- counters ---------------------------------------------------------------------------


def test_lookups_count_on_admission_and_only_then() -> None:
    """A request that waits for blocks is looked up in every step, and counted once."""
    driver = Driver(7)
    start_running(driver, "A", num_tokens=60)
    driver.submit("B", [*text("A", 48), *text("b", 40)])
    driver.steps(5)
    assert driver.waiting == ["B"]
    assert (driver.core.accounting.queries_tokens, driver.core.accounting.hits_tokens) == (60, 0)
    driver.end("A")
    driver.run()
    assert (driver.core.accounting.queries_tokens, driver.core.accounting.hits_tokens) == (148, 48)


def test_without_caching_no_lookup_is_counted() -> None:
    driver = Driver(11, caching=False)
    driver.submit("A", text("a", 40), max_tokens=20)
    driver.steps(3)
    driver.lose_group()
    driver.run()
    accounting = driver.core.accounting
    (totals,) = accounting.by_cause.values()
    assert (accounting.queries_tokens, accounting.hits_tokens) == (0, 0)
    assert (totals.resume_queries_tokens, totals.resume_hits_tokens) == (0, 0)


@pytest.mark.parametrize("caching", [True, False])
def test_planned_tokens_are_prompt_and_output(caching: bool) -> None:
    driver = Driver(11, caching=caching)
    driver.submit("A", text("a", 40), max_tokens=20)
    driver.run()
    tokens = driver.core.accounting.scheduled_tokens
    assert (tokens.prompt, tokens.output, tokens.recompute) == (40, 19, 0)
