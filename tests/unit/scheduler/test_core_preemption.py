"""Blocks run out: who loses them, what is kept, and how it comes back (SEMANTICS 4.3 and 5)."""

import pytest

from scheduler.accounting import CauseTotals
from scheduler.messages import CloseReason, InterruptionCause, StepPlan, unpack_token_ids
from scheduler.request import Status
from tests.support.drive import Driver, closed, extended, opened, scheduled, text


def run_dry() -> tuple[Driver, StepPlan]:
    """A and B fill a pool of 4 blocks; the next step needs a fifth. Returns that step."""
    driver = Driver(5)
    driver.submit("A", text("a", 31), max_tokens=30)
    driver.submit("B", text("b", 31), max_tokens=30)
    driver.steps(2)
    assert driver.free_queue == []
    plan = driver.step()
    assert plan is not None
    return driver, plan


def unplan() -> tuple[Driver, StepPlan]:
    """`patient` is planned first, with a chunk that fills its third block and takes the last
    free one; then `urgent`, with a chunk of one, needs a block. Returns that step."""
    driver = Driver(
        7, policy="priority", max_num_batched_tokens=20, long_prefill_token_threshold=10
    )
    driver.submit("patient", text("p", 60), max_tokens=9, priority=1)
    driver.step()
    driver.submit("urgent", text("u", 16), max_tokens=9, priority=0)
    driver.submit("later", text("l", 32), max_tokens=9, priority=0)
    driver.steps(2)
    computed = {name: driver.request(name).num_computed for name in driver.running}
    assert computed == {"patient": 40, "urgent": 16, "later": 4}
    assert len(driver.free_queue) == 1
    plan = driver.step()
    assert plan is not None
    return driver, plan


def bill(driver: Driver, cause: InterruptionCause = InterruptionCause.BLOCKS) -> CauseTotals:
    return driver.core.accounting.by_cause[cause]


# -- the victim -------------------------------------------------------------------------


def test_fcfs_preempts_who_was_admitted_last() -> None:
    _, plan = run_dry()
    assert scheduled(plan) == {"A": 1}
    assert list(closed(plan)) == ["B"]


def test_fcfs_request_that_is_last_preempts_itself() -> None:
    driver = Driver(5)
    driver.submit("A", text("a", 40), max_tokens=40)
    driver.submit("B", text("b", 16), max_tokens=40)
    driver.step()
    plan = driver.step()
    assert scheduled(plan) == {"A": 1}
    assert list(closed(plan)) == ["B"]
    assert driver.running == ["A"]


def test_priority_preempts_the_least_urgent_even_if_it_came_first() -> None:
    driver = Driver(5, policy="priority")
    driver.submit("patient", text("a", 31), max_tokens=40, priority=1)
    driver.submit("urgent", text("b", 31), max_tokens=40, priority=0)
    driver.steps(2)
    plan = driver.step()
    assert list(closed(plan)) == ["patient"]
    assert scheduled(plan) == {"urgent": 1}


def test_priority_preempts_the_latest_of_equals() -> None:
    driver = Driver(5, policy="priority")
    driver.submit("late", text("a", 31), max_tokens=40, arrival=9.0)
    driver.submit("early", text("b", 31), max_tokens=40, arrival=1.0)
    driver.steps(2)
    assert list(closed(driver.step())) == ["late"]


def test_victims_are_taken_until_the_blocks_are_there() -> None:
    """A's second chunk needs two blocks, and B and C have one each."""
    driver = Driver(5, max_num_batched_tokens=40, long_prefill_token_threshold=32)
    for name, num_tokens in (("A", 64), ("B", 4), ("C", 4)):
        driver.submit(name, text(name, num_tokens), max_tokens=9)
    assert scheduled(driver.step()) == {"A": 32, "B": 4, "C": 4}
    plan = driver.step()
    assert list(closed(plan)) == ["C", "B"]
    assert scheduled(plan) == {"A": 32}


def admitted_in_turn(num_blocks: int, patient_tokens: int, urgent_tokens: int) -> Driver:
    """`patient` is admitted first, and so planned first; `urgent` outranks it."""
    driver = Driver(num_blocks, policy="priority")
    driver.submit("patient", text("p", patient_tokens), max_tokens=60, priority=1)
    driver.step()
    driver.submit("urgent", text("u", urgent_tokens), max_tokens=60, priority=0)
    driver.step()
    assert driver.running == ["patient", "urgent"]
    return driver


def test_after_a_request_preempted_itself_under_priority_the_pass_goes_on() -> None:
    driver = admitted_in_turn(5, 31, 17)
    plan = driver.step()
    assert list(closed(plan)) == ["patient"]
    assert scheduled(plan) == {"urgent": 1}


# -- a victim that was already planned --------------------------------------------------


def test_victim_that_was_already_planned_is_unplanned() -> None:
    _, plan = unplan()
    assert list(closed(plan)) == ["patient"]
    assert "patient" not in scheduled(plan)


def test_unplanned_victim_gives_its_budget_back() -> None:
    """20 - 1 are left for `later`, who takes its limit of 10; else 9 would be left."""
    _, plan = unplan()
    assert scheduled(plan) == {"urgent": 1, "later": 10}


def test_blocks_that_an_unplanned_victim_just_got_are_not_announced() -> None:
    _, plan = unplan()
    assert list(extended(plan)) == ["urgent"]


def test_unplanned_work_is_not_booked() -> None:
    driver, _ = unplan()
    booked = driver.core.accounting.scheduled_tokens.total
    assert booked == sum(sum(scheduled(plan).values()) for plan in driver.plans)


def test_unplanned_victim_held_what_was_really_computed() -> None:
    driver, _ = unplan()
    assert bill(driver).held_tokens == 40


def test_unplanned_work_cannot_be_found() -> None:
    """SEMANTICS 2.5: the chunk that was taken back would have filled the third block."""
    driver, _ = unplan()
    driver.submit("same prompt", text("p", 60), priority=9)
    hit = driver.core.group.kv.find_hit(driver.request("same prompt"))
    assert len(hit) * 16 <= 32


# -- what is kept, what is freed --------------------------------------------------------


def test_victim_keeps_its_tokens_and_loses_its_blocks() -> None:
    driver, _ = run_dry()
    victim = driver.request("B")
    assert victim.status is Status.WAITING
    assert victim.num_computed == 0
    assert victim.block_ids == []
    assert list(victim.token_ids) == [*text("b", 31), *driver.solo("B")[:2]]


def test_on_the_wire_a_preemption_is_a_closed_table() -> None:
    _, plan = run_dry()
    close = closed(plan)["B"]
    assert (close.seq.attempt, close.reason) == (1, CloseReason.PREEMPTED)


def test_freed_blocks_stay_findable() -> None:
    driver, _ = run_dry()
    group = driver.core.group
    assert group.kv.find_hit(driver.request("B")) != []


def test_victim_goes_to_the_front_of_the_fcfs_queue() -> None:
    driver = Driver(5)
    driver.submit("A", text("a", 31), max_tokens=40)
    driver.submit("B", text("b", 31), max_tokens=40)
    driver.steps(2)
    driver.submit("C", text("c", 5))
    driver.step()
    assert driver.waiting == ["B", "C"]


def test_of_two_victims_the_earlier_admitted_resumes_first() -> None:
    driver = Driver(7)
    for name in ("A", "B", "C"):
        driver.submit(name, text(name, 31), max_tokens=60)
    driver.steps(2)
    while len(driver.running) > 1:
        driver.step()
    assert driver.waiting == ["B", "C"]


def test_victim_goes_to_its_place_by_priority() -> None:
    driver = admitted_in_turn(5, 20, 32)
    driver.submit("middle", text("m", 5), priority=0)
    driver.submit("last", text("z", 5), priority=2)
    driver.step()
    assert driver.waiting == ["middle", "patient", "last"]


# -- resume -----------------------------------------------------------------------------


def test_resume_opens_the_table_again_with_a_new_attempt_and_all_tokens() -> None:
    driver, _ = run_dry()
    driver.end("A")
    update = opened(driver.step())["B"]
    assert update.seq.attempt == 2
    assert list(unpack_token_ids(update.token_ids)) == [*text("b", 31), *driver.solo("B")[:2]]
    assert update.num_prompt_tokens == 31


def test_attempt_rises_when_the_table_is_opened_not_when_it_is_closed() -> None:
    driver, _ = run_dry()
    assert driver.request("B").attempt == 1


def test_resume_in_a_lull_pays_for_the_one_block_that_drove_it_out() -> None:
    """Its last, which was spent first."""
    driver, _ = run_dry()
    driver.end("A")
    driver.step()
    totals = bill(driver)
    assert (totals.held_tokens, totals.recovered_tokens, totals.recomputed_tokens) == (32, 16, 16)


def test_resume_after_churn_pays_for_what_was_evicted() -> None:
    driver, _ = run_dry()
    driver.run()
    totals = bill(driver)
    assert (totals.held_tokens, totals.recovered_tokens, totals.recomputed_tokens) == (32, 0, 32)


def test_nothing_is_repeated_lost_or_changed_for_the_client() -> None:
    driver, _ = run_dry()
    driver.run()
    for name in ("A", "B"):
        assert driver.output(name) == driver.solo(name)


def test_recomputed_tokens_are_booked_as_recompute() -> None:
    driver, _ = run_dry()
    driver.run()
    tokens, totals = driver.core.accounting.scheduled_tokens, bill(driver)
    assert tokens.recompute == totals.recomputed_tokens
    assert (tokens.prompt, tokens.output) == (62, 58)


def test_request_that_ends_before_it_resumes_drops_its_bill() -> None:
    driver, _ = run_dry()
    driver.end("B")
    totals = bill(driver)
    assert (totals.held_tokens, totals.dropped_tokens) == (32, 32)


def test_cached_tokens_stay_those_of_the_first_admission() -> None:
    driver, _ = run_dry()
    driver.run()
    usage = driver.usage("B")
    assert usage.cached_tokens == 0
    assert usage.interruptions is not None
    assert usage.interruptions.recovered_tokens + usage.interruptions.recomputed_tokens == 32


def test_resume_lookup_does_not_inflate_the_first() -> None:
    driver, _ = run_dry()
    driver.end("A")
    driver.step()
    accounting = driver.core.accounting
    assert (accounting.queries_tokens, accounting.hits_tokens) == (62, 0)
    assert (bill(driver).resume_queries_tokens, bill(driver).resume_hits_tokens) == (33, 16)


# -- livelock and deadlock --------------------------------------------------------------


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("prompt_tokens", [47, 48, 49])
def test_request_preempted_by_its_own_next_token_gets_on(
    steps_in_flight: int, prompt_tokens: int
) -> None:
    """SEMANTICS 5.3: resumed at a whole number of blocks, its next token finds no block, while
    the one before it is still under way. If that one were dropped each time, it would never
    get on; counted while it waits, it makes the request too large to be let in again yet."""
    for others_tokens in range(29, 33):
        driver = Driver(7, steps_in_flight=steps_in_flight)
        driver.submit("A", text("a", others_tokens), max_tokens=60)
        driver.submit("R", text("r", prompt_tokens), max_tokens=5)
        driver.run()
        assert driver.output("R") == driver.solo("R")
        interruptions = driver.usage("R").interruptions
        assert interruptions is None or interruptions.count <= 2


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_only_request_of_a_tiny_pool_never_preempts_itself(
    steps_in_flight: int, policy: str
) -> None:
    driver = Driver(4, steps_in_flight=steps_in_flight, policy=policy)
    driver.submit("R", text("r", 10), max_tokens=100)
    driver.run()
    assert driver.output("R") == driver.solo("R")[:39]
    assert driver.usage("R").interruptions is None
