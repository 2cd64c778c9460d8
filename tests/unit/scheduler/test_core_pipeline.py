"""Pipeline stages: several plans under way, a request in one of them at most (SEMANTICS 4.8)."""

from collections import Counter

import pytest

from scheduler.group import Pipeline
from scheduler.messages import InterruptionCause
from tests.support.drive import Driver, closed, extended, opened, scheduled, text


def pipeline(num_blocks: int = 60, num_stages: int = 3, **settings: object) -> Driver:
    return Driver(
        num_blocks,
        pipeline_stages=num_stages,
        steps_in_flight=num_stages + 1,
        **settings,  # type: ignore[arg-type]
    )


def decoding(num_requests: int, *, num_stages: int = 3, max_tokens: int = 40) -> Driver:
    """Requests that have all sent their first token, with nothing in flight."""
    driver = pipeline(num_stages=num_stages, max_num_seqs=num_requests)
    for i in range(num_requests):
        driver.submit(f"r{i}", text(chr(97 + i), 10), max_tokens=max_tokens)
    driver.plan()
    driver.answer()
    assert all(request.num_output_tokens == 1 for request in driver.core.requests.values())
    return driver


def test_request_is_in_one_plan_in_flight_at_most() -> None:
    driver = pipeline(max_num_batched_tokens=20)
    for name in "ABCDE":
        driver.submit(name, text(name, 30), max_tokens=10)
    while driver.core.requests:
        while driver.plan() is not None:
            busy = Counter(name for plan in driver.in_flight for name in scheduled(plan))
            assert max(busy.values(), default=0) <= 1
        driver.answer()


def test_chunks_of_one_prompt_wait_for_each_other() -> None:
    driver = pipeline(max_num_batched_tokens=16)
    driver.submit("A", text("a", 40), max_tokens=5)
    assert scheduled(driver.plan()) == {"A": 16}
    assert driver.plan() is None
    driver.answer()
    assert scheduled(driver.plan()) == {"A": 16}


@pytest.mark.parametrize(("num_requests", "shares"), [(6, [2, 2, 2]), (7, [3, 3, 1]), (2, [1, 1])])
def test_every_stage_gets_a_batch(num_requests: int, shares: list[int]) -> None:
    driver = decoding(num_requests)
    plans = []
    while (plan := driver.plan()) is not None:
        plans.append(len(scheduled(plan)))
    assert plans == shares


def test_window_holds_one_plan_more_than_there_are_stages() -> None:
    driver = pipeline(max_num_batched_tokens=10)
    for name in "ABCDEF":
        driver.submit(name, text(name, 10), max_tokens=10)
    plans = [driver.plan() for _ in range(5)]
    assert [scheduled(plan) for plan in plans] == [{"A": 10}, {"B": 10}, {"C": 10}, {"D": 10}, {}]


def test_everybody_gets_on_at_the_same_pace() -> None:
    driver = decoding(7)
    for _ in range(30):
        driver.step()
    counts = [request.num_output_tokens for request in driver.core.requests.values()]
    assert max(counts) - min(counts) <= 1


def test_prompt_chunks_do_not_count_as_decodes() -> None:
    """New prompts get in beside the share of those that decode."""
    driver = decoding(6)
    driver.end("r0")
    driver.submit("new", text("z", 50), max_tokens=5)
    assert scheduled(driver.plan()) == {"r1": 1, "r2": 1, "new": 50}


def test_sampled_ids_reach_all_ranks_with_the_next_plan_of_their_request() -> None:
    driver = pipeline()
    driver.submit("A", text("a", 10), max_tokens=5)
    driver.plan()
    driver.answer()
    update = extended(driver.plan())["A"]
    assert list(update.token_ids) == driver.solo("A")[:1]


def test_every_id_but_the_last_is_sent_once_and_in_order() -> None:
    driver = pipeline()
    for name in "ABCD":
        driver.submit(name, text(name, 10), max_tokens=30)
    driver.run()
    for name in "ABCD":
        updates = [extended(plan).get(name) for plan in driver.plans]
        sent = [token_id for update in updates if update for token_id in update.token_ids]
        assert sent == driver.solo(name)[:-1]


def test_with_one_step_in_flight_ids_are_sent_all_the_same() -> None:
    driver = Driver(20, pipeline_stages=2, steps_in_flight=1)
    driver.submit("A", text("a", 10), max_tokens=3)
    driver.plan()
    driver.answer()
    assert list(extended(driver.plan())["A"].token_ids) == driver.solo("A")[:1]


def test_preempted_request_is_not_opened_again_while_it_is_in_flight() -> None:
    """Every stage would meet its new table before the old work has left the last stage."""
    driver = pipeline(5, num_stages=2)
    driver.submit("A", text("a", 32), max_tokens=30)
    driver.plan()
    driver.submit("B", text("b", 31), max_tokens=30)
    driver.plan()
    driver.answer()
    assert list(closed(driver.plan())) == ["B"]
    driver.end("A")
    assert opened(driver.plan()) == {}
    driver.answer()
    assert driver.output("B") == driver.solo("B")[:1]
    assert opened(driver.plan())["B"].seq.attempt == 2


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("num_blocks", [6, 9, 14])
def test_text_does_not_depend_on_the_number_of_stages(
    policy: str, num_stages: int, num_blocks: int
) -> None:
    driver = pipeline(num_blocks, num_stages=num_stages, policy=policy, max_num_batched_tokens=25)
    for count, name in enumerate("ABCDEF"):
        priority = count % 3 if policy == "priority" else 0
        driver.submit(name, text(name, 30), max_tokens=20, priority=priority)
    driver.run()
    for name in "ABCDEF":
        assert driver.output(name) == driver.solo(name)


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 3)])
def test_next_group_may_have_other_stages(before: int, after: int) -> None:
    """The window, the batches of the stages, and who appends what was sampled are the new ones."""
    driver = pipeline(num_stages=before, max_num_seqs=6)
    for i in range(6):
        driver.submit(f"r{i}", text(chr(97 + i), 10), max_tokens=12)
    driver.steps(3)
    driver.lose_group(cause=InterruptionCause.RESIZE)
    core = driver.core
    core.begin_epoch(core.group.epoch + 1, 60, Pipeline(after, after + 1))
    driver.plan()
    driver.answer()
    while driver.plan() is not None:
        assert len(driver.in_flight) <= after + 1
        assert len(scheduled(driver.in_flight[-1])) <= -(-6 // after)
    assert len(driver.in_flight) == (after + 1 if after == 1 else after)
    driver.run()
    for i in range(6):
        assert driver.output(f"r{i}") == driver.solo(f"r{i}")
    bills = driver.core.accounting.by_cause
    assert list(bills) == [InterruptionCause.RESIZE]
