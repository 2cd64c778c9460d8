"""One request on its own: its moves, what it lacks, when it ends."""

import itertools

import pytest

from scheduler.errors import IllegalMoveError, ProtocolError
from scheduler.messages import (
    FinishReason,
    InterruptionCause,
    Interruptions,
    PromptLogprobs,
    SamplingParams,
    Usage,
)
from scheduler.request import Move, Request, Status
from tests.support.drive import request_of, text, token_row


def request(
    num_prompt_tokens: int = 5, max_tokens: int = 10, *, output: int = 0, **sampling: object
) -> Request:
    parameters = {"max_tokens": max_tokens, "seed": 0, **sampling}
    return Request.of(
        request_of(
            "r",
            text("a", num_prompt_tokens),
            SamplingParams(**parameters),  # type: ignore[arg-type]
            output=text("b", output),
        ),
        submit_index=0,
    )


# -- moves ------------------------------------------------------------------------------

LEGAL = {
    (Status.WAITING, Move.ADMIT): Status.RUNNING,
    (Status.WAITING, Move.FINISH): Status.FINISHED,
    (Status.RUNNING, Move.PREEMPT): Status.WAITING,
    (Status.RUNNING, Move.FINISH): Status.FINISHED,
}
ILLEGAL = [pair for pair in itertools.product(Status, Move) if pair not in LEGAL]


def in_status(status: Status) -> Request:
    made = request()
    made.status = status
    return made


@pytest.mark.parametrize(("pair", "after"), LEGAL.items())
def test_legal_move(pair: tuple[Status, Move], after: Status) -> None:
    status, move = pair
    made = in_status(status)
    made.move(move, step=3)
    assert made.status is after


@pytest.mark.parametrize(("status", "move"), ILLEGAL)
def test_illegal_move_is_an_error_and_changes_nothing(status: Status, move: Move) -> None:
    made = in_status(status)
    with pytest.raises(IllegalMoveError, match=f"{move.value} is illegal while {status.value}"):
        made.move(move, step=3)
    assert made.status is status
    assert not made.story


def test_illegal_move_tells_the_story() -> None:
    made = request()
    made.move(Move.ADMIT, step=1)
    made.num_computed = 5
    made.move(Move.PREEMPT, step=4)
    with pytest.raises(IllegalMoveError) as caught:
        made.move(Move.PREEMPT, step=9)
    assert "step 1: admit with 0/5 tokens; step 4: preempt with 5/5 tokens" in str(caught.value)


def test_story_holds_no_token_ids_and_does_not_grow_for_ever() -> None:
    made = request()
    for step in range(100):
        made.move(Move.ADMIT if made.status is Status.WAITING else Move.PREEMPT, step)
    assert len(made.story) == 32
    told = " ".join(what for _, what in made.story)
    assert not any(str(token_id) in told for token_id in made.token_ids)


# -- what it lacks ----------------------------------------------------------------------


def test_new_request_lacks_its_prompt() -> None:
    made = request(5)
    made.num_expected = made.num_tokens
    assert made.num_lacking == 5


def test_sampled_token_still_on_its_way_counts_as_lacking() -> None:
    made = request(5)
    made.num_computed, made.num_expected = 5, 6
    assert (made.num_tokens, made.num_lacking) == (5, 1)


def test_last_token_of_all_lacks_nothing() -> None:
    """Nobody reads it, so it needs no slot and no step."""
    made = request(5, max_tokens=2)
    made.num_computed, made.num_expected = 6, 7
    assert made.num_lacking == 0


# -- stops ------------------------------------------------------------------------------


def test_goes_on_until_max_tokens() -> None:
    made = request(5, max_tokens=3)
    assert [made.append(t) for t in (1, 2, 3)] == [None, None, FinishReason.LENGTH]


@pytest.mark.parametrize("name", ["eos_token_ids", "stop_token_ids"])
def test_stop_id_ends_it(name: str) -> None:
    made = request(**{name: (7,)})  # type: ignore[arg-type]
    assert made.append(6) is None
    assert made.append(7) is FinishReason.STOP


def test_ignored_end_of_sequence_does_not_end_it() -> None:
    assert request(eos_token_ids=(7,), ignore_eos=True).append(7) is None


def test_ignore_eos_does_not_ignore_stop_ids() -> None:
    made = request(eos_token_ids=(7,), stop_token_ids=(8,), ignore_eos=True)
    assert made.append(8) is FinishReason.STOP


def test_stop_id_at_the_last_length_is_a_stop() -> None:
    """End-of-sequence is asked before the length."""
    assert request(max_tokens=1, eos_token_ids=(7,)).append(7) is FinishReason.STOP


def test_stops_are_masked_until_there_are_min_tokens() -> None:
    made = request(min_tokens=2, eos_token_ids=(7,))
    assert [made.append(7) for _ in range(3)] == [None, None, FinishReason.STOP]


def test_min_tokens_counts_generated_tokens_only() -> None:
    made = request(num_prompt_tokens=60, min_tokens=50, max_tokens=64, eos_token_ids=(7,))
    ends = [made.append(7) for _ in range(51)]
    assert ends == [None] * 50 + [FinishReason.STOP]


def test_min_tokens_does_not_put_off_the_length() -> None:
    made = request(max_tokens=2, min_tokens=2, eos_token_ids=(7,))
    assert [made.append(7) for _ in range(2)] == [None, FinishReason.LENGTH]


def test_prompt_that_ends_in_a_stop_id_has_not_ended() -> None:
    made = request(3, eos_token_ids=tuple(text("a", 3)))
    assert made.finish_reason() is None


# -- prompt logprobs --------------------------------------------------------------------


def rows(first: int, end: int) -> PromptLogprobs:
    return PromptLogprobs(first, tuple(token_row(p, p) for p in range(first, end)))


def positions(made: Request) -> list[int]:
    return [round(-8 * row.logprob) for row in made.prompt_logprobs]


def test_prompt_logprobs_are_kept_by_position() -> None:
    made = request(10, prompt_logprobs=0)
    made.keep_prompt_logprobs(rows(1, 5))
    made.keep_prompt_logprobs(rows(5, 10))
    assert positions(made) == list(range(1, 10))


@pytest.mark.parametrize(("first", "end"), [(1, 10), (3, 10), (1, 3), (5, 10)])
def test_rows_that_come_again_are_kept_once(first: int, end: int) -> None:
    made = request(10, prompt_logprobs=0)
    made.keep_prompt_logprobs(rows(1, 5))
    made.keep_prompt_logprobs(rows(first, end))
    assert positions(made) == list(range(1, max(5, end)))


def test_rows_that_leave_a_gap_are_an_error() -> None:
    made = request(10, prompt_logprobs=0)
    made.keep_prompt_logprobs(rows(1, 4))
    with pytest.raises(ProtocolError, match=r"from position 5, expected 4 or less"):
        made.keep_prompt_logprobs(rows(5, 10))


def test_rows_after_the_first_token_are_ignored() -> None:
    """They went out with it."""
    made = request(10, prompt_logprobs=0)
    made.append(1)
    made.keep_prompt_logprobs(rows(4, 10))
    assert made.prompt_logprobs == []


# -- continuations ----------------------------------------------------------------------


def test_continuation_restores_what_its_client_was_told() -> None:
    usage = Usage(5, 2, 16, Interruptions({InterruptionCause.BLOCKS: 2}, 32, 7, 1.5))
    message = request_of(
        "r",
        text("a", 5),
        SamplingParams(max_tokens=9, seed=0),
        output=text("b", 2),
        usage_so_far=usage,
    )
    made = Request.of(message, submit_index=0)
    assert (made.num_prompt_tokens, made.num_output_tokens) == (5, 2)
    assert made.is_continuation
    assert made.usage() == usage


def test_usage_of_an_undisturbed_request_tells_of_no_interruption() -> None:
    assert request(5, output=3).usage() == Usage(5, 3, 0, None)
