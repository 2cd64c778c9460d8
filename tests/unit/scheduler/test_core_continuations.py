"""Requests that lost their scheduler and are submitted again with what they have."""

import pytest

from scheduler.messages import (
    EndReason,
    FinishReason,
    InterruptionCause,
    Interruptions,
    SamplingParams,
    SubmitRequest,
    Usage,
    unpack_token_ids,
)
from tests.support.drive import Driver, opened, request_of, sampled, text

LOST = InterruptionCause.SCHEDULER_LOST


def continuation(
    name: str = "R",
    num_prompt_tokens: int = 20,
    num_output_tokens: int = 3,
    *,
    max_tokens: int = 10,
    arrival: float = 0.0,
    priority: int = 0,
    usage: Usage | None = None,
) -> SubmitRequest:
    """Seed 0, so the tokens that it already has are those the model gives."""
    return request_of(
        name,
        text("r", num_prompt_tokens),
        SamplingParams(max_tokens=max_tokens, seed=0),
        arrival=arrival,
        priority=priority,
        output=[sampled(0, num_prompt_tokens + i) for i in range(num_output_tokens)],
        usage_so_far=usage or Usage(num_prompt_tokens, num_output_tokens, 0),
    )


def test_continuation_goes_on_where_it_was() -> None:
    driver = Driver(11)
    driver.offer(continuation())
    driver.run()
    assert driver.output("R") == driver.solo("R")[3:]
    assert driver.finish("R") is FinishReason.LENGTH
    assert driver.usage("R").completion_tokens == 10


def test_workers_see_prompt_and_output_apart() -> None:
    driver = Driver(11)
    driver.offer(continuation())
    update = opened(driver.plan())["R"]
    assert update.num_prompt_tokens == 20
    assert len(unpack_token_ids(update.token_ids)) == 23


def test_loss_of_the_scheduler_is_an_interruption_like_any_other() -> None:
    """It held all but the token that was sampled last."""
    driver = Driver(11)
    driver.offer(continuation())
    driver.run()
    totals = driver.core.accounting.by_cause[LOST]
    assert (totals.preemptions, totals.held_tokens, totals.recomputed_tokens) == (1, 22, 22)
    interruptions = driver.usage("R").interruptions
    assert interruptions is not None
    assert interruptions.causes == {LOST: 1}


def test_computing_it_again_is_recompute_not_prompt() -> None:
    driver = Driver(11)
    driver.offer(continuation())
    driver.run()
    tokens = driver.core.accounting.scheduled_tokens
    assert (tokens.recompute, tokens.prompt, tokens.output) == (22, 0, 7)


def test_request_that_had_sent_nothing_held_nothing() -> None:
    driver = Driver(11)
    driver.offer(continuation(num_output_tokens=0))
    driver.run()
    assert driver.core.accounting.by_cause[LOST].held_tokens == 0
    assert driver.core.accounting.scheduled_tokens.prompt == 20
    assert driver.output("R") == driver.solo("R")


def test_history_is_carried_on() -> None:
    before = Interruptions({InterruptionCause.BLOCKS: 2}, 32, 7, 1.5)
    driver = Driver(11)
    driver.offer(continuation(usage=Usage(20, 3, 16, before)))
    driver.run()
    usage = driver.usage("R")
    assert usage.cached_tokens == 16
    assert usage.interruptions is not None
    assert usage.interruptions.causes == {InterruptionCause.BLOCKS: 2, LOST: 1}
    assert usage.interruptions.recovered_tokens == 32
    assert usage.interruptions.recomputed_tokens == 7 + 22
    assert usage.interruptions.stalled_seconds == 2.5


def test_lookup_of_a_continuation_counts_as_that_of_a_resume() -> None:
    driver = Driver(11)
    driver.offer(continuation())
    driver.run()
    assert driver.core.accounting.queries_tokens == 0
    assert driver.core.accounting.by_cause[LOST].resume_queries_tokens == 23


def test_continuations_find_each_others_prefixes() -> None:
    driver = Driver(11)
    driver.offer(continuation("A", 40), continuation("B", 40))
    plan = driver.plan()
    assert [update.num_computed for update in opened(plan).values()] == [0, 32]


def test_first_delta_of_a_continuation_carries_usage() -> None:
    driver = Driver(11)
    driver.offer(continuation())
    driver.step()
    usage = driver.deltas["R"][0].usage
    assert usage is not None
    assert usage.completion_tokens == 4


def test_continuations_are_served_by_arrival_and_before_the_new() -> None:
    driver = Driver(40)
    driver.submit("new", text("n", 5), arrival=0.0)
    driver.offer(continuation("late", arrival=9.0))
    driver.offer(continuation("early", arrival=3.0))
    assert driver.waiting == ["early", "late", "new"]


def test_under_priority_a_continuation_goes_to_its_place() -> None:
    driver = Driver(40, policy="priority")
    driver.submit("urgent", text("u", 5), priority=-1)
    driver.submit("equal", text("n", 5), arrival=0.0)
    driver.offer(continuation("continued", arrival=9.0))
    assert driver.waiting == ["urgent", "continued", "equal"]


@pytest.mark.parametrize(
    ("num_blocks", "max_model_len", "num_output_tokens"),
    [(11, 1024, 10), (11, 23, 3), (2, 1024, 3), (2, 1024, 1)],
    ids=["by its wish", "by the model", "by the pool", "prompt alone is too large"],
)
def test_continuation_that_has_nothing_left_to_do_ends_with_length(
    num_blocks: int, max_model_len: int, num_output_tokens: int
) -> None:
    driver = Driver(num_blocks, max_model_len=max_model_len)
    driver.offer(continuation(num_output_tokens=num_output_tokens))
    assert driver.finish("R") is FinishReason.LENGTH
    assert driver.usage("R").completion_tokens == num_output_tokens
    assert driver.core.is_idle


def test_continuation_that_had_its_stop_ends_with_stop() -> None:
    driver = Driver(11)
    message = request_of(
        "R",
        text("r", 20),
        SamplingParams(max_tokens=9, seed=0, eos_token_ids=(7,)),
        output=[5, 7],
        usage_so_far=Usage(20, 2, 0),
    )
    driver.offer(message)
    assert driver.finish("R") is FinishReason.STOP


def test_continuation_whose_prompt_no_longer_fits_and_sent_nothing_ends_with_an_error() -> None:
    driver = Driver(2)
    driver.offer(continuation(num_output_tokens=0))
    assert driver.finish("R") is FinishReason.ERROR
    error = driver.deltas["R"][-1].error
    assert error is not None
    assert "16" in error


def test_continuation_that_ends_before_it_resumes_drops_its_bill() -> None:
    driver = Driver(11)
    driver.offer(continuation())
    driver.end("R", EndReason.ABORT)
    totals = driver.core.accounting.by_cause[LOST]
    assert (totals.held_tokens, totals.dropped_tokens) == (22, 22)


def test_continuation_submitted_twice_is_served_once() -> None:
    driver = Driver(11)
    driver.offer(continuation())
    driver.offer(continuation())
    driver.run()
    assert driver.output("R") == driver.solo("R")[3:]


def test_end_that_overtakes_a_continuation_charges_what_the_client_has() -> None:
    driver = Driver(11)
    driver.end("R", EndReason.STOP, num_output_tokens=2)
    driver.offer(continuation())
    assert driver.finish("R") is FinishReason.STOP
    assert driver.usage("R").completion_tokens == 2
