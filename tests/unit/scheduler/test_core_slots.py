"""All slots are taken and somebody more urgent waits: SEMANTICS 5.8, on and off."""

import random

import pytest

from scheduler.accounting import CauseTotals
from scheduler.messages import CloseReason, InterruptionCause
from tests.support.drive import Driver, closed, opened, scheduled, text

SLOTS = InterruptionCause.SLOTS


def full(num_blocks: int = 40, **settings: object) -> Driver:
    """Two patient requests of 40 tokens take both slots; `p2` is the less urgent one."""
    driver = Driver(num_blocks, max_num_seqs=2, policy="priority", **settings)  # type: ignore[arg-type]
    driver.submit("p1", text("1", 40), max_tokens=60, priority=4)
    driver.submit("p2", text("2", 40), max_tokens=60, priority=5)
    driver.steps(3)
    assert driver.running == ["p1", "p2"]
    return driver


def bill(driver: Driver) -> CauseTotals:
    return driver.core.accounting.by_cause[SLOTS]


# -- slot preemption on -----------------------------------------------------------------


def test_more_urgent_request_takes_the_slot_of_the_least_urgent() -> None:
    driver = full()
    driver.submit("urgent", text("u", 10), max_tokens=5, priority=0)
    plan = driver.step()
    assert closed(plan)["p2"].reason is CloseReason.PREEMPTED
    assert scheduled(plan) == {"p1": 1, "urgent": 10}
    assert driver.waiting == ["p2"]


def test_slot_preemption_has_its_own_cause() -> None:
    driver = full()
    driver.submit("urgent", text("u", 10), max_tokens=5, priority=0)
    driver.run()
    assert (bill(driver).preemptions, bill(driver).held_tokens) == (1, 42)
    interruptions = driver.usage("p2").interruptions
    assert interruptions is not None
    assert interruptions.causes == {SLOTS: 1}


def test_victim_finds_all_full_blocks_again_while_there_is_room() -> None:
    driver = full()
    driver.submit("urgent", text("u", 10), max_tokens=5, priority=0)
    driver.run()
    assert (bill(driver).recovered_tokens, bill(driver).recomputed_tokens) == (32, 10)
    assert driver.output("p2") == driver.solo("p2")


@pytest.mark.parametrize("priority", [5, 6])
def test_equals_and_less_urgent_ones_never_swap(priority: int) -> None:
    driver = full()
    driver.submit("late", text("u", 10), priority=priority, arrival=-9.0)
    driver.steps(3)
    assert driver.running == ["p1", "p2"]


def test_priority_alone_decides_not_the_arrival() -> None:
    """p1 and p2 are equal; the one that arrived last makes way."""
    driver = Driver(40, max_num_seqs=2, policy="priority")
    driver.submit("late", text("1", 40), max_tokens=60, priority=4, arrival=9.0)
    driver.submit("early", text("2", 40), max_tokens=60, priority=4, arrival=1.0)
    driver.steps(2)
    driver.submit("urgent", text("u", 10), priority=0)
    assert list(closed(driver.step())) == ["late"]


def test_two_urgent_requests_take_two_slots_in_one_step() -> None:
    driver = full()
    driver.submit("u1", text("x", 10), max_tokens=5, priority=0)
    driver.submit("u2", text("y", 10), max_tokens=5, priority=1)
    plan = driver.step()
    assert set(closed(plan)) == {"p1", "p2"}
    assert scheduled(plan) == {"u1": 10, "u2": 10}
    assert driver.waiting == ["p1", "p2"]


def test_second_urgent_request_takes_no_slot_from_one_as_urgent_as_itself() -> None:
    driver = full()
    driver.submit("u1", text("x", 10), max_tokens=5, priority=0)
    driver.submit("u2", text("y", 10), max_tokens=5, priority=4)
    plan = driver.step()
    assert list(closed(plan)) == ["p2"]
    assert driver.running == ["p1", "u1"]


def test_free_slot_is_taken_without_a_victim() -> None:
    driver = full()
    driver.end("p1")
    driver.submit("urgent", text("u", 10), max_tokens=5, priority=0)
    assert list(closed(driver.step())) == ["p1"]
    assert driver.running == ["p2", "urgent"]


def test_no_victim_if_the_urgent_request_would_lack_blocks_even_then() -> None:
    """p1 and p2 hold 3 of 6 blocks each; 64 tokens need 4, and the victim's 3 are not enough."""
    driver = full(7)
    driver.submit("urgent", text("u", 60), max_tokens=5, priority=0)
    plan = driver.step()
    assert closed(plan) == {}
    assert driver.running == ["p1", "p2"]


def test_blocks_of_the_victim_count_for_the_urgent_request() -> None:
    driver = full(7)
    driver.submit("urgent", text("u", 44), max_tokens=2, priority=0)
    plan = driver.step()
    assert list(closed(plan)) == ["p2"]
    assert scheduled(plan) == {"p1": 1, "urgent": 44}


def test_blocks_that_the_others_need_in_this_step_are_not_promised() -> None:
    """p1 is about to need a block of its own: 3 of the victim's blocks minus 1."""
    driver = full(7)
    while driver.request("p1").num_computed < 48:
        driver.step()
    driver.submit("urgent", text("u", 44), max_tokens=2, priority=0)
    driver.step()
    assert bill(driver).preemptions == 0


def test_blocks_shared_by_the_victim_and_the_urgent_request_are_counted_once() -> None:
    """Both begin alike. Of the victim's 3 blocks the urgent request hits 2 and takes 1 new."""
    driver = full(7)
    driver.submit("urgent", [*text("2", 32), *text("u", 12)], max_tokens=2, priority=0)
    plan = driver.step()
    assert list(closed(plan)) == ["p2"]
    assert opened(plan)["urgent"].num_computed == 32
    assert len(set(opened(plan)["urgent"].block_ids)) == 3


def test_blocks_shared_by_the_victim_and_others_are_not_freed() -> None:
    """The victim shares 2 of its 3 blocks with p1, so that giving it up frees one."""
    driver = Driver(7, max_num_seqs=2, policy="priority")
    driver.submit("p1", text("1", 40), max_tokens=60, priority=4)
    driver.step()
    driver.submit("p2", [*text("1", 32), *text("2", 8)], max_tokens=60, priority=5)
    driver.step()
    driver.submit("urgent", text("u", 50), max_tokens=5, priority=0)
    assert driver.core.group.pool.num_free == 2
    driver.step()
    assert bill(driver).preemptions == 0
    driver.end("urgent")
    driver.submit("smaller", text("s", 48), max_tokens=5, priority=0)
    assert list(closed(driver.step())) == ["p2"]


def test_evictable_hits_of_the_urgent_request_count_as_demand() -> None:
    """It hits 2 free blocks and lacks 4; with the victim's 3 there are 5, and 6 are needed."""
    driver = Driver(9, max_num_seqs=2, policy="priority")
    driver.submit("gone", text("g", 32))
    driver.run()
    driver.submit("p1", text("1", 40), max_tokens=60, priority=4)
    driver.submit("p2", text("2", 40), max_tokens=60, priority=5)
    driver.step()
    driver.submit("urgent", [*text("g", 32), *text("u", 60)], max_tokens=5, priority=0)
    driver.step()
    assert driver.running == ["p1", "p2"]


def test_blocks_promised_to_one_urgent_request_are_not_promised_to_the_next() -> None:
    """u1 takes 3 of the 6 blocks that both victims hold, and 3 are not enough for u2."""
    driver = full(7)
    driver.submit("u1", text("x", 44), max_tokens=2, priority=0)
    driver.submit("u2", text("y", 60), max_tokens=2, priority=1)
    driver.step()
    assert driver.running == ["p1", "u1"]


def test_budget_promised_to_one_urgent_request_is_not_promised_to_the_next() -> None:
    """u1 wants all 20 tokens of a step; were p1 gone too, u1 would take its token as well."""
    driver = Driver(40, max_num_seqs=2, policy="priority", max_num_batched_tokens=20)
    driver.submit("p1", text("1", 10), max_tokens=60, priority=4)
    driver.submit("p2", text("2", 10), max_tokens=60, priority=5)
    driver.step()
    driver.submit("u1", text("x", 20), max_tokens=2, priority=0)
    driver.submit("u2", text("y", 5), max_tokens=2, priority=1)
    plan = driver.step()
    assert list(closed(plan)) == ["p2"]
    assert scheduled(plan) == {"p1": 1, "u1": 19}


def test_no_victim_if_the_budget_of_the_step_is_spent() -> None:
    driver = Driver(60, max_num_seqs=2, policy="priority", max_num_batched_tokens=20)
    driver.submit("p1", text("1", 200), max_tokens=9, priority=4)
    driver.submit("p2", text("2", 19), max_tokens=9, priority=5)
    while len(driver.running) < 2:
        driver.step()
    driver.end("p1")
    driver.submit("p3", text("3", 200), max_tokens=9, priority=4)
    driver.step()
    assert driver.running == ["p2", "p3"]
    driver.submit("urgent", text("u", 10), priority=0)
    assert scheduled(driver.step()) == {"p2": 1, "p3": 19}
    assert bill(driver).preemptions == 0


def test_long_prefill_of_another_does_not_keep_the_urgent_request_out() -> None:
    """`long` lacks more than the whole budget, but takes no more than its limit of a step."""
    driver = Driver(
        80,
        max_num_seqs=2,
        policy="priority",
        max_num_batched_tokens=64,
        long_prefill_token_threshold=32,
    )
    driver.submit("long", text("1", 800), max_tokens=9, priority=4)
    driver.submit("p2", text("2", 10), max_tokens=60, priority=5)
    driver.steps(2)
    assert driver.running == ["long", "p2"]
    driver.submit("urgent", text("u", 10), max_tokens=9, priority=0)
    plan = driver.step()
    assert scheduled(plan) == {"long": 32, "urgent": 10}
    assert list(closed(plan)) == ["p2"]


def test_prefill_of_another_that_is_under_way_does_not_keep_the_urgent_request_out() -> None:
    """With pipeline stages `long` is in flight and takes no part in the next plan."""
    driver = Driver(
        80,
        max_num_seqs=2,
        policy="priority",
        max_num_batched_tokens=64,
        pipeline_stages=2,
        steps_in_flight=3,
    )
    driver.submit("long", text("1", 800), max_tokens=9, priority=4)
    driver.submit("p2", text("2", 10), max_tokens=60, priority=5)
    assert scheduled(driver.plan()) == {"long": 64}
    assert scheduled(driver.plan()) == {"p2": 10}
    driver.submit("urgent", text("u", 10), max_tokens=9, priority=0)
    assert scheduled(driver.plan()) == {"urgent": 10}


@pytest.mark.parametrize(("num_tokens", "gets_in"), [(98, True), (99, False)])
def test_without_chunks_the_urgent_request_needs_its_whole_prompt_in_the_budget(
    num_tokens: int, gets_in: bool
) -> None:
    """Two of the three that run stay, and take a token each."""
    driver = Driver(
        60,
        max_num_seqs=3,
        policy="priority",
        max_num_batched_tokens=100,
        max_model_len=100,
        enable_chunked_prefill=False,
    )
    for name in ("1", "2", "3"):
        driver.submit(name, text(name, 30), max_tokens=50, priority=4)
    driver.step()
    driver.submit("urgent", text("u", num_tokens), priority=0)
    assert ("urgent" in scheduled(driver.step())) == gets_in
    assert bill(driver).preemptions == gets_in


def test_slot_preemption_does_not_close_the_step_to_others() -> None:
    """Unlike a preemption for blocks (4.4)."""
    driver = full()
    driver.submit("urgent", text("u", 10), max_tokens=5, priority=0)
    plan = driver.step()
    assert list(closed(plan)) == ["p2"]
    assert list(opened(plan)) == ["urgent"]


def test_victim_gets_its_slot_back_when_the_urgent_one_is_done() -> None:
    driver = full()
    driver.submit("urgent", text("u", 10), max_tokens=3, priority=0)
    driver.steps(5)
    assert driver.running == ["p1", "p2"]


def test_under_fcfs_nobody_takes_a_slot() -> None:
    driver = Driver(40, max_num_seqs=1)
    driver.submit("A", text("a", 10), max_tokens=20)
    driver.submit("B", text("b", 10), max_tokens=20)
    driver.run()
    assert bill(driver).preemptions == 0


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
def test_everybody_gets_the_text_of_an_undisturbed_run(steps_in_flight: int) -> None:
    driver = Driver(30, max_num_seqs=2, policy="priority", steps_in_flight=steps_in_flight)
    names = "ABCDEFGH"
    for priority, name in enumerate(names):
        driver.submit(name, text(name, 20), max_tokens=25, priority=-priority)
        driver.steps(3)
    driver.run()
    assert bill(driver).preemptions == 6
    for name in names:
        assert driver.output(name) == driver.solo(name)


@pytest.mark.parametrize("seed", range(5))
def test_nobody_gives_up_a_slot_in_vain(seed: int) -> None:
    """For each victim somebody more urgent is admitted in the same step, whatever else is up."""
    rng = random.Random(seed)
    pipeline_stages = rng.choice((1, 3))
    driver = Driver(
        rng.randint(12, 30),
        max_num_seqs=rng.randint(1, 4),
        policy="priority",
        max_num_batched_tokens=rng.randint(8, 80),
        long_prefill_token_threshold=rng.choice((0, 5, 20)),
        pipeline_stages=pipeline_stages,
        steps_in_flight=pipeline_stages + rng.randint(0, 1),
    )
    for count in range(150):
        prompt = text(rng.choice("abc"), rng.randint(1, 90))
        driver.submit(
            f"r{count}", prompt, max_tokens=rng.randint(1, 30), priority=rng.randrange(10)
        )
        for _ in range(rng.randrange(4)):
            before = bill(driver).preemptions
            plan = driver.plan()
            num_victims = bill(driver).preemptions - before
            assert len(opened(plan)) >= num_victims
            if driver.in_flight and (plan is None or rng.random() < 0.8):
                driver.answer()
    assert bill(driver).preemptions > 0


# -- slot preemption off ----------------------------------------------------------------


def test_switched_off_the_urgent_request_waits_for_a_slot() -> None:
    driver = full(slot_preemption=False)
    driver.submit("urgent", text("u", 10), max_tokens=5, priority=0)
    plan = driver.step()
    assert closed(plan) == {}
    assert driver.waiting == ["urgent"]


# -- resume first -----------------------------------------------------------------------


def preempted_and_new(*, resume_first: bool) -> Driver:
    """`preempted` lost its blocks; `new` is its equal, by its clock arrived before it."""
    driver = Driver(5, policy="priority", resume_first=resume_first)
    driver.submit("first", text("1", 31), max_tokens=30, arrival=1.0)
    driver.submit("preempted", text("2", 31), max_tokens=30, arrival=3.0)
    driver.steps(2)
    driver.submit("new", text("3", 17), max_tokens=9, arrival=2.0)
    driver.step()
    assert "preempted" in driver.waiting
    return driver


def test_preempted_request_resumes_before_its_equal_that_never_ran() -> None:
    driver = preempted_and_new(resume_first=True)
    assert driver.waiting == ["preempted", "new"]


def test_switched_off_the_earlier_arrival_goes_first() -> None:
    driver = preempted_and_new(resume_first=False)
    assert driver.waiting == ["new", "preempted"]


def test_resuming_first_saves_blocks_that_the_other_would_write_over() -> None:
    recomputed = {}
    for resume_first in (True, False):
        driver = preempted_and_new(resume_first=resume_first)
        driver.end("first")
        driver.run()
        assert driver.output("preempted") == driver.solo("preempted")
        interruptions = driver.usage("preempted").interruptions
        assert interruptions is not None
        recomputed[resume_first] = interruptions.recomputed_tokens
    assert recomputed[True] <= recomputed[False]


def test_more_urgent_new_request_goes_before_the_preempted_one() -> None:
    driver = preempted_and_new(resume_first=True)
    driver.submit("urgent", text("4", 5), priority=-1)
    assert driver.waiting[0] == "urgent"
