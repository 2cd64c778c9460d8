"""One choice: what its deltas mean to a client."""

from collections.abc import Sequence

import pytest

from cluster.choice import Choice, Finish, Piece, StopRules
from cluster.text import Detokenizer
from scheduler.messages import FinishReason, TokenDelta, Usage
from tests.support.tokenizers import IM_END_ID, byte_level

USAGE = Usage(prompt_tokens=3, completion_tokens=99, cached_tokens=0)


def encode(text: str) -> list[int]:
    token_ids: list[int] = byte_level().encode(text).ids
    return token_ids


def read(
    tokens: Sequence[int],
    rules: StopRules | None = None,
    *,
    finish: FinishReason = FinishReason.LENGTH,
    group: int = 1,
) -> tuple[str, Piece, Choice]:
    """All text, the last piece, and the choice, of tokens that come `group` at a time.

    Stops reading where the engine would be told to stop.
    """
    detokenizer = Detokenizer(byte_level(), (), skip_special_tokens=True)
    choice = Choice(0, "r/0", detokenizer, rules or StopRules())
    text = ""
    for start in range(0, len(tokens), group):
        part = tuple(tokens[start : start + group])
        is_last = start + group >= len(tokens)
        delta = TokenDelta(
            "r/0", part, finish=finish if is_last else None, usage=USAGE if is_last else None
        )
        piece = choice.read(delta)
        text += piece.text
        if choice.is_stopped and not is_last:
            piece = choice.read(TokenDelta("r/0", (), finish=FinishReason.STOP, usage=USAGE))
            assert piece.text == ""
            break
    return text, piece, choice


def num_tokens_until(stop: str, tokens: Sequence[int]) -> int:
    return next(n for n in range(len(tokens)) if stop in byte_level().decode(tokens[:n]))


@pytest.mark.parametrize("group", [1, 2, 7, 100])
@pytest.mark.parametrize(
    ("text", "stop", "kept"),
    [
        ("The quick brown fox jumps over", "own fox", "The quick br"),
        ("alpha beta gamma delta", "beta gamma", "alpha "),
        ("one two three four five six", "five", "one two three four "),
        ("one two three", "nine", "one two three"),
    ],
)
def test_stop_texts_do_not_depend_on_how_tokens_come(
    text: str, stop: str, kept: str, group: int
) -> None:
    got, last, choice = read(encode(text), StopRules(texts=(stop,)), group=group)
    assert got == kept
    if kept == text:
        assert (last.finish, last.stop_reason) == (Finish.LENGTH, None)
    else:
        assert (last.finish, last.stop_reason) == (Finish.STOP, stop)
        assert choice.num_output_tokens == num_tokens_until(stop, encode(text))


def test_usage_runs_up_to_the_token_that_completed_the_stop_text() -> None:
    tokens = encode("one two three four")
    _, last, _ = read(tokens, StopRules(texts=("two",)), group=len(tokens))
    assert last.num_output_tokens == len(encode("one two"))


def test_a_stop_text_wins_over_an_end_that_comes_with_it() -> None:
    tokens = [*encode("one two"), IM_END_ID]
    _, last, _ = read(tokens, StopRules(texts=("two",)), finish=FinishReason.STOP, group=100)
    assert (last.finish, last.stop_reason) == (Finish.STOP, "two")


def test_what_was_held_back_comes_at_the_end() -> None:
    text, last, _ = read(encode("one two thr"), StopRules(texts=("three",)))
    assert text == "one two thr"
    assert last.finish is Finish.LENGTH


def test_the_token_that_ends_the_output_is_no_text() -> None:
    tokens = [*encode("one two"), *encode(" three")]
    stop_id = tokens[-1]
    rules = StopRules(token_ids=frozenset({stop_id}))
    text, last, choice = read(tokens, rules, finish=FinishReason.STOP)
    assert "one two" in text
    assert not text.endswith(byte_level().decode([stop_id]))
    assert (last.finish, last.stop_reason) == (Finish.STOP, stop_id)
    assert choice.num_output_tokens == len(tokens)


def test_the_token_that_ends_the_output_is_text_if_wanted() -> None:
    tokens = encode("one two three")
    rules = StopRules(token_ids=frozenset({tokens[-1]}), include_in_output=True)
    text, _, _ = read(tokens, rules, finish=FinishReason.STOP)
    assert text == "one two three"


def test_end_of_sequence_is_no_stop_reason() -> None:
    _, last, _ = read([*encode("one"), IM_END_ID], finish=FinishReason.STOP)
    assert (last.finish, last.stop_reason) == (Finish.STOP, None)


def test_stop_texts_are_looked_for_beyond_min_tokens_only() -> None:
    tokens = encode("one two one two one two")
    first = len(encode("one two one"))
    text, last, _ = read(tokens, StopRules(texts=("two",), min_tokens=first))
    assert text == "one two one "
    assert last.num_output_tokens > first
    text, last, _ = read(tokens, StopRules(texts=("two",), min_tokens=len(tokens)))
    assert text == "one two one two one two"
    assert last.finish is Finish.LENGTH


def test_an_error_of_the_engine_is_the_last_piece() -> None:
    detokenizer = Detokenizer(byte_level(), (), skip_special_tokens=True)
    choice = Choice(0, "r/0", detokenizer, StopRules())
    piece = choice.read(TokenDelta("r/0", (), finish=FinishReason.ERROR, error="no more room"))
    assert (piece.finish, piece.error) == (None, "no more room")


def test_an_error_after_a_stop_text_is_nobodys_concern() -> None:
    detokenizer = Detokenizer(byte_level(), (), skip_special_tokens=True)
    choice = Choice(0, "r/0", detokenizer, StopRules(texts=("one",)))
    for token_id in encode("one"):
        choice.read(TokenDelta("r/0", (token_id,)))
    piece = choice.read(TokenDelta("r/0", (), finish=FinishReason.ERROR, error="too late"))
    assert (piece.finish, piece.stop_reason, piece.error) == (Finish.STOP, "one", None)
