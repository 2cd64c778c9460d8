"""What is let in and what is refused, with which words: SEMANTICS 5.7 and the queue limits."""

import pytest
from msgspec import structs

from configs import Config, ConfigError, ModelConfig, SchedulerConfig, resolve
from scheduler.messages import (
    Accepted,
    BadRequest,
    FinishReason,
    NeverFits,
    QueueFull,
    SamplingParams,
    SubmitRequest,
    Usage,
)
from tests.support.drive import Driver, request_of, text


def message(
    name: str, num_prompt_tokens: int = 10, max_tokens: int = 5, *, ignore_eos: bool = False
) -> SubmitRequest:
    return request_of(
        name,
        text("a", num_prompt_tokens),
        SamplingParams(max_tokens=max_tokens, seed=0, ignore_eos=ignore_eos),
    )


# -- what no scheduler of this configuration could serve --------------------------------


def test_empty_prompt_is_a_bad_request() -> None:
    answer = Driver(11).offer(message("r", 0))
    assert isinstance(answer, BadRequest)
    assert answer.param == "prompt"


@pytest.mark.parametrize("field", ["prompt_token_ids", "output_token_ids"])
def test_torn_token_ids_are_a_bad_request(field: str) -> None:
    torn = structs.replace(message("r"), usage_so_far=Usage(10, 0, 0), **{field: bytes(7)})
    assert isinstance(Driver(11).offer(torn), BadRequest)


@pytest.mark.parametrize(("num_prompt_tokens", "fits"), [(63, True), (64, False), (65, False)])
def test_prompt_must_leave_room_for_one_token(num_prompt_tokens: int, fits: bool) -> None:
    driver = Driver(11, max_model_len=64)
    answer = driver.offer(message("r", num_prompt_tokens))
    if fits:
        driver.run()
        assert len(driver.output("r")) == 1
        assert driver.finish("r") is FinishReason.LENGTH
    else:
        assert isinstance(answer, BadRequest)
        assert answer.param == "prompt"
        assert "maximum context length is 64 tokens" in answer.message
        assert f"your prompt has {num_prompt_tokens}" in answer.message


@pytest.mark.parametrize("max_tokens", [0, -1])
def test_max_tokens_must_be_positive(max_tokens: int) -> None:
    answer = Driver(11).offer(message("r", max_tokens=max_tokens))
    assert isinstance(answer, BadRequest)
    assert answer.param == "max_tokens"
    assert str(max_tokens) in answer.message


def test_priority_under_fcfs_is_a_bad_request() -> None:
    """Silently ignoring it would be a lie."""
    urgent = request_of("r", text("a", 5), SamplingParams(max_tokens=1, seed=0), priority=-2)
    answer = Driver(11).offer(urgent)
    assert isinstance(answer, BadRequest)
    assert answer.param == "priority"
    assert "-2" in answer.message
    assert Driver(11, policy="priority").offer(urgent) == Accepted()


def test_without_chunks_a_step_must_hold_a_whole_context() -> None:
    """Else a resumed request could never get in again (SEMANTICS 4.5)."""
    settings = Config(
        model=ModelConfig(max_model_len=1024),
        scheduler=SchedulerConfig(max_num_batched_tokens=1023, enable_chunked_prefill=False),
    )
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens is 1023.*1024 tokens"):
        resolve(settings, "cpu")


def test_without_chunks_a_request_of_the_full_context_resumes() -> None:
    driver = Driver(9, max_model_len=128, max_num_batched_tokens=128, enable_chunked_prefill=False)
    driver.submit("r", text("a", 100), max_tokens=100)
    while driver.request("r").num_tokens < 127:
        driver.step()
    driver.lose_group()
    driver.run()
    assert driver.output("r") == driver.solo("r")[:28]


# -- what can never fit -----------------------------------------------------------------


def test_prompt_larger_than_the_pool_never_fits() -> None:
    answer = Driver(11).offer(message("r", 161))
    assert isinstance(answer, NeverFits)
    assert answer.capacity_tokens == 160
    assert "161" in answer.message
    assert "160" in answer.message


def test_prompt_of_the_whole_pool_fits_and_yields_one_token() -> None:
    """The last token needs no slot."""
    driver = Driver(11)
    driver.submit("r", text("a", 160), max_tokens=50)
    driver.run()
    assert driver.output("r") == driver.solo("r")[:1]
    assert driver.finish("r") is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("num_blocks", "max_model_len", "num_output_tokens"),
    [(100, 1024, 30), (100, 120, 20), (8, 1024, 13), (8, 110, 10)],
    ids=["by its own wish", "by the model", "by the pool", "model tighter than pool"],
)
def test_output_is_clamped_by_the_tightest_limit(
    num_blocks: int, max_model_len: int, num_output_tokens: int
) -> None:
    driver = Driver(num_blocks, max_model_len=max_model_len)
    driver.submit("r", text("a", 100), max_tokens=30)
    driver.run()
    assert driver.output("r") == driver.solo("r")[:num_output_tokens]
    assert driver.finish("r") is FinishReason.LENGTH


@pytest.mark.parametrize(("max_tokens", "fits"), [(61, True), (62, False)])
def test_ignore_eos_makes_a_clamp_by_the_pool_a_refusal(max_tokens: int, fits: bool) -> None:
    """Prompt and output but for the last token need 160 slots, or 161."""
    answer = Driver(11).offer(message("r", 100, max_tokens, ignore_eos=True))
    if fits:
        assert answer == Accepted()
    else:
        assert isinstance(answer, NeverFits)
        assert answer.capacity_tokens == 160
        assert "161" in answer.message
        assert "160" in answer.message


def test_ignore_eos_is_clamped_by_the_model_not_refused() -> None:
    driver = Driver(11, max_model_len=128)
    assert driver.offer(message("r", 100, 1000, ignore_eos=True)) == Accepted()
    driver.run()
    assert len(driver.output("r")) == 28


def test_refused_request_leaves_nothing_behind_and_the_next_is_served() -> None:
    driver = Driver(11)
    for _ in range(50):
        assert isinstance(driver.offer(message("large", 161)), NeverFits)
    assert driver.core.is_idle
    driver.submit("r", text("a", 10), max_tokens=2)
    driver.run()
    assert driver.output("r") == driver.solo("r")
    assert driver.deltas["large"] == []


# -- the length of the queue ------------------------------------------------------------


def test_queue_is_full_in_requests() -> None:
    driver = Driver(11, max_waiting_requests=2)
    assert driver.offer(message("a")) == Accepted()
    assert driver.offer(message("b")) == Accepted()
    answer = driver.offer(message("c"))
    assert isinstance(answer, QueueFull)
    assert "2 requests are waiting" in answer.message


def test_queue_is_full_in_tokens() -> None:
    driver = Driver(11, max_waiting_tokens=100)
    assert driver.offer(message("a", 60)) == Accepted()
    assert driver.offer(message("b", 40)) == Accepted()
    answer = driver.offer(message("c", 1))
    assert isinstance(answer, QueueFull)
    assert "100 tokens are waiting" in answer.message


def test_queue_has_room_again_when_somebody_starts() -> None:
    driver = Driver(11, max_waiting_requests=1)
    driver.offer(message("a"))
    assert isinstance(driver.offer(message("b")), QueueFull)
    driver.step()
    assert driver.offer(message("b")) == Accepted()


def test_empty_queue_takes_any_one_call() -> None:
    """Else a call larger than the limit could never be served."""
    driver = Driver(11, max_waiting_requests=1, max_waiting_tokens=5)
    assert driver.offer(message("a/0"), message("a/1"), message("a/2")) == Accepted()


def test_full_queue_says_how_much_the_call_would_add() -> None:
    driver = Driver(11, max_waiting_requests=3)
    driver.offer(message("a"))
    answer = driver.offer(message("b/0"), message("b/1"), message("b/2"))
    assert isinstance(answer, QueueFull)
    assert "1 requests are waiting" in answer.message
    assert "yours adds 3" in answer.message
    assert "at most 3" in answer.message


def test_preempted_requests_count_as_waiting() -> None:
    driver = Driver(11, max_waiting_requests=1)
    driver.submit("r", text("a", 40), max_tokens=20)
    driver.step()
    driver.lose_group()
    assert isinstance(driver.offer(message("b")), QueueFull)


def test_continuation_is_never_turned_away_for_the_length_of_the_queue() -> None:
    driver = Driver(11, max_waiting_requests=1, max_waiting_tokens=20)
    driver.offer(message("a", 20))
    continuation = request_of(
        "b",
        text("b", 30),
        SamplingParams(max_tokens=5, seed=0),
        output=text("x", 2),
        usage_so_far=Usage(30, 2, 0),
    )
    assert driver.offer(continuation) == Accepted()


# -- several in one call, and the same again --------------------------------------------


@pytest.mark.parametrize(
    ("bad", "kind"),
    [(message("x", 0), BadRequest), (message("x", 161), NeverFits)],
    ids=["bad request", "never fits"],
)
def test_call_is_admitted_whole_or_not_at_all(bad: SubmitRequest, kind: type) -> None:
    driver = Driver(11)
    assert isinstance(driver.offer(message("a"), bad, message("b")), kind)
    assert driver.waiting == []
    assert driver.core.is_idle


def test_call_that_does_not_fit_into_the_queue_is_turned_away_whole() -> None:
    driver = Driver(11, max_waiting_requests=3)
    driver.offer(message("a"))
    assert isinstance(driver.offer(message("b"), message("c"), message("d")), QueueFull)
    assert driver.waiting == ["a"]


def test_submitting_a_living_request_again_changes_nothing() -> None:
    driver = Driver(11, max_waiting_requests=1)
    driver.submit("r", text("a", 10), max_tokens=3)
    assert driver.offer(message("r", 99)) == Accepted()
    assert driver.waiting == ["r"]
    driver.run()
    assert driver.output("r") == driver.solo("r")
    assert driver.finish("r") is FinishReason.LENGTH


def test_known_id_does_not_stop_the_others_of_its_call() -> None:
    driver = Driver(11)
    driver.offer(message("a"))
    assert driver.offer(message("a"), message("b")) == Accepted()
    assert driver.waiting == ["a", "b"]


def test_one_call_that_names_an_id_twice_submits_it_once() -> None:
    driver = Driver(11)
    assert driver.offer(message("a", 10), message("b", 10), message("a", 20)) == Accepted()
    assert driver.waiting == ["a", "b"]
    assert driver.request("a").num_tokens == 10


def test_submitting_again_after_the_end_changes_nothing_for_a_minute() -> None:
    driver = Driver(11)
    driver.offer(message("r", max_tokens=1))
    driver.step()
    assert driver.finish("r") is not None
    ended = driver.now
    driver.run()
    num_deltas = len(driver.deltas["r"])
    driver.now = ended + 60.0
    assert driver.offer(message("r")) == Accepted()
    assert driver.core.is_idle
    assert len(driver.deltas["r"]) == num_deltas
    driver.now = ended + 61.0
    driver.offer(message("r"))
    assert driver.waiting == ["r"]


def test_refused_request_may_be_submitted_again() -> None:
    driver = Driver(11, max_waiting_requests=1)
    driver.offer(message("a"))
    driver.offer(message("b"))
    driver.step()
    assert driver.offer(message("b")) == Accepted()
    assert driver.waiting == ["b"]


def test_refusals_are_counted_by_reason() -> None:
    driver = Driver(11, max_waiting_requests=1)
    for each in (message("a", 0), message("b", 161), message("c"), message("d"), message("e")):
        driver.offer(each)
    assert driver.core.accounting.rejected == {"bad_request": 1, "never_fits": 1, "queue_full": 2}


def test_without_chunks_a_budget_below_the_context_length_is_refused() -> None:
    """A request that was preempted at a greater length could never get in again."""
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens is 512, .* context length 1024"):
        Driver(81, enable_chunked_prefill=False, max_num_batched_tokens=512, max_model_len=1024)
