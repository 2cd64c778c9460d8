"""Log probabilities of the prompt: no row lost, none doubled (SEMANTICS 3.3)."""

import pytest

from scheduler.messages import TokenDelta, TokenLogprobs, Usage
from tests.support.drive import Driver, opened, request_of, text, token_row


def expected_rows(prompt: list[int]) -> list[TokenLogprobs]:
    """Position 0 has none."""
    return [token_row(position, prompt[position]) for position in range(1, len(prompt))]


def sent_rows(driver: Driver, name: str) -> list[TokenLogprobs]:
    return [row for delta in driver.deltas[name] for row in delta.prompt_logprobs]


def bearers(driver: Driver, name: str) -> list[TokenDelta]:
    return [delta for delta in driver.deltas[name] if delta.prompt_logprobs]


@pytest.mark.parametrize("max_num_batched_tokens", [7, 32, 512])
@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
def test_all_rows_come_with_the_first_token(
    max_num_batched_tokens: int, steps_in_flight: int
) -> None:
    driver = Driver(
        20, max_num_batched_tokens=max_num_batched_tokens, steps_in_flight=steps_in_flight
    )
    driver.submit("R", text("r", 100), max_tokens=4, prompt_logprobs=0)
    driver.run()
    assert bearers(driver, "R") == driver.deltas["R"][:1]
    assert sent_rows(driver, "R") == expected_rows(text("r", 100))


def test_first_admission_reads_no_cache_and_counts_no_lookup() -> None:
    driver = Driver(20)
    driver.submit("before", text("r", 100))
    driver.run()
    queries_tokens = driver.core.accounting.queries_tokens
    driver.submit("R", text("r", 100), max_tokens=4, prompt_logprobs=0)
    assert opened(driver.plan())["R"].num_computed == 0
    assert driver.core.accounting.queries_tokens == queries_tokens


def test_it_fills_the_cache_for_others() -> None:
    driver = Driver(20)
    driver.submit("R", text("r", 100), max_tokens=4, prompt_logprobs=0)
    driver.run()
    driver.submit("after", text("r", 100))
    assert opened(driver.plan())["after"].num_computed == 96


def test_prompt_of_one_token_has_no_row() -> None:
    driver = Driver(20)
    driver.submit("R", text("r", 1), max_tokens=4, prompt_logprobs=0)
    driver.run()
    assert sent_rows(driver, "R") == []
    assert driver.output("R") == driver.solo("R")


def interrupted_prefill(num_chunks: int) -> Driver:
    """`urgent` takes the only slot after some chunks of 20 tokens; the blocks stay in the pool."""
    driver = Driver(20, max_num_batched_tokens=20, policy="priority", max_num_seqs=1)
    driver.submit("R", text("r", 100), max_tokens=4, priority=1, prompt_logprobs=0)
    driver.steps(num_chunks)
    driver.submit("urgent", text("u", 10), max_tokens=1, priority=0)
    driver.step()
    assert driver.waiting == ["R"]
    return driver


@pytest.mark.parametrize("num_chunks", [1, 2, 3, 4])
def test_prefill_interrupted_between_chunks_loses_and_doubles_no_row(num_chunks: int) -> None:
    driver = interrupted_prefill(num_chunks)
    driver.run()
    assert sent_rows(driver, "R") == expected_rows(text("r", 100))
    assert driver.output("R") == driver.solo("R")


@pytest.mark.parametrize(("num_chunks", "hit"), [(1, 16), (2, 32), (3, 48), (4, 80)])
def test_resume_reads_the_cache_up_to_the_first_missing_row(num_chunks: int, hit: int) -> None:
    driver = interrupted_prefill(num_chunks)
    assert opened(driver.step())["R"].num_computed == hit


def test_resume_after_the_first_token_reads_everything_and_sends_no_row_again() -> None:
    driver = Driver(20, policy="priority", max_num_seqs=1)
    driver.submit("R", text("r", 100), max_tokens=9, priority=1, prompt_logprobs=0)
    driver.steps(3)
    driver.submit("urgent", text("u", 10), max_tokens=1, priority=0)
    driver.step()
    assert opened(driver.step())["R"].num_computed == 96
    driver.run()
    assert bearers(driver, "R") == driver.deltas["R"][:1]


@pytest.mark.parametrize("num_steps", [1, 3, 5, 7])
def test_loss_of_the_group_loses_and_doubles_no_row(num_steps: int) -> None:
    """The whole prompt is computed again, and its rows come again."""
    driver = Driver(20, max_num_batched_tokens=20)
    driver.submit("R", text("r", 100), max_tokens=9, prompt_logprobs=0)
    driver.steps(num_steps)
    driver.lose_group()
    driver.run()
    assert sent_rows(driver, "R") == expected_rows(text("r", 100))
    assert len(bearers(driver, "R")) == 1


def test_first_token_that_arrives_while_waiting_brings_the_rows() -> None:
    driver = Driver(5, steps_in_flight=2)
    driver.submit("A", text("a", 31), max_tokens=30)
    driver.submit("R", text("r", 32), max_tokens=9, prompt_logprobs=0)
    driver.plan()
    driver.plan()
    assert driver.waiting == ["R"]
    driver.answer()
    assert sent_rows(driver, "R") == expected_rows(text("r", 32))
    driver.run()
    assert len(bearers(driver, "R")) == 1


def test_rows_of_a_dropped_attempt_are_computed_again() -> None:
    """The group dies with the chunk in flight, so its rows never come."""
    driver = Driver(20, max_num_batched_tokens=20, steps_in_flight=2)
    driver.submit("R", text("r", 100), max_tokens=9, prompt_logprobs=0)
    driver.plan()
    driver.plan()
    driver.answer()
    for plan in driver.lose_group():
        driver.deliver(driver.result_of(plan))
    driver.run()
    assert sent_rows(driver, "R") == expected_rows(text("r", 100))


def test_continuation_that_has_sent_tokens_brings_no_rows() -> None:
    driver = Driver(20)
    driver.submit("original", text("r", 40), max_tokens=9, prompt_logprobs=0, seed=0)
    message = driver._messages["original"]
    driver.end("original")
    driver.offer(
        request_of(
            "R",
            text("r", 40),
            message.sampling,
            output=driver.solo("original")[:2],
            usage_so_far=Usage(40, 2, 0),
        )
    )
    driver.run()
    assert sent_rows(driver, "R") == []
    assert driver.output("R") == driver.solo("R")[2:]


def test_end_before_the_first_token_sends_no_rows() -> None:
    driver = Driver(20, max_num_batched_tokens=20)
    driver.submit("R", text("r", 100), max_tokens=9, prompt_logprobs=0)
    driver.steps(2)
    driver.end("R")
    assert sent_rows(driver, "R") == []
