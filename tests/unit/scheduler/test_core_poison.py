"""A request that kills the workers is found, and nobody else pays for it (ARCHITECTURE 7.5)."""

import pytest

from scheduler.messages import FinishReason, InterruptionCause
from tests.support.drive import Driver, scheduled, text

PATIENCE = 200


def lose_while_computing(driver: Driver, poison: str) -> int:
    """Run until nothing is left; the workers die over every step with work of `poison`.

    How often they did.
    """
    num_deaths = 0
    for _ in range(PATIENCE):
        if not driver.core.requests:
            return num_deaths
        plan = driver.plan()
        if poison in scheduled(plan):
            num_deaths += 1
            driver.lose_group()
        else:
            driver.answer()
    raise AssertionError("it never ends")


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_the_culprit_fails_and_all_others_get_their_text(steps_in_flight: int) -> None:
    driver = Driver(60, steps_in_flight=steps_in_flight)
    for name in "ABPCD":
        driver.submit(name, text(name, 20), max_tokens=12)
    num_deaths = lose_while_computing(driver, "P")
    assert driver.finish("P") is FinishReason.ERROR
    assert num_deaths == 4
    for name in "ABCD":
        assert driver.finish(name) is FinishReason.LENGTH
        assert driver.output(name) == driver.solo(name)


def test_a_culprit_that_first_yields_tokens_is_found_too() -> None:
    driver = Driver(60)
    for name in "AP":
        driver.submit(name, text(name, 20), max_tokens=40)
    driver.steps(5)
    assert lose_while_computing(driver, "P") == 4
    assert driver.output("P") == driver.solo("P")[:5]
    assert driver.output("A") == driver.solo("A")


def test_deaths_with_a_token_in_between_prove_nothing() -> None:
    driver = Driver(60)
    driver.submit("A", text("a", 20), max_tokens=30)
    while driver.core.requests:
        driver.steps(2)
        driver.plan()
        driver.lose_group()
    assert driver.output("A") == driver.solo("A")


def test_who_was_not_being_computed_is_no_suspect() -> None:
    driver = Driver(60, max_num_seqs=2)
    for name in "ABCD":
        driver.submit(name, text(name, 20), max_tokens=30)
    for _ in range(2):
        driver.plan()
        driver.lose_group()
    driver.end("A")
    driver.end("B")
    assert set(scheduled(driver.step())) == {"C", "D"}


def test_suspects_are_computed_one_at_a_time_and_then_all_together() -> None:
    driver = Driver(60)
    for name in "ABC":
        driver.submit(name, text(name, 20), max_tokens=30)
    for _ in range(2):
        driver.plan()
        driver.lose_group()
    driver.submit("new", text("n", 20), max_tokens=30)
    alone = [set(scheduled(driver.step())) for _ in range(3)]
    assert alone == [{"A"}, {"B"}, {"C"}]
    assert set(scheduled(driver.step())) == {"A", "B", "C", "new"}


def test_a_long_prompt_is_alone_until_its_first_token() -> None:
    driver = Driver(60, max_num_batched_tokens=16)
    driver.submit("A", text("a", 40), max_tokens=30)
    driver.submit("B", text("b", 10), max_tokens=30)
    for _ in range(2):
        driver.plan()
        driver.lose_group()
    assert [scheduled(driver.step()) for _ in range(3)] == [{"A": 16}, {"A": 16}, {"A": 8}]
    assert set(scheduled(driver.step())) == {"A", "B"}


def test_a_suspect_gets_in_at_the_expense_of_those_that_were_cleared() -> None:
    """The pool held both while they were short; alone and full-grown only one fits at a time."""
    driver = Driver(9, max_num_batched_tokens=400)
    driver.submit("A", text("a", 60), max_tokens=60)
    driver.submit("B", text("b", 60), max_tokens=60)
    driver.steps(4)
    for _ in range(2):
        driver.plan()
        driver.lose_group()
    assert set(scheduled(driver.step())) == {"A"}
    assert set(scheduled(driver.step())) == {"B"}
    driver.run()
    for name in "AB":
        assert driver.output(name) == driver.solo(name)


@pytest.mark.parametrize("cause", [InterruptionCause.DRAIN, InterruptionCause.RESIZE])
def test_a_group_that_is_given_up_on_purpose_accuses_nobody(cause: InterruptionCause) -> None:
    driver = Driver(60)
    driver.submit("A", text("a", 20), max_tokens=30)
    driver.submit("B", text("b", 20), max_tokens=30)
    for _ in range(3):
        driver.plan()
        driver.lose_group(cause=cause)
    assert set(scheduled(driver.step())) == {"A", "B"}


def test_a_suspect_that_ends_frees_the_others() -> None:
    driver = Driver(60)
    for name in "AB":
        driver.submit(name, text(name, 20), max_tokens=30)
    for _ in range(2):
        driver.plan()
        driver.lose_group()
    driver.end("A")
    driver.end("B")
    driver.submit("C", text("c", 20), max_tokens=3)
    driver.run()
    assert driver.output("C") == driver.solo("C")
