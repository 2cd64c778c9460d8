"""Stop texts: never given out in part, and nothing is held back that cannot become one."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.stop_texts import StopFound, StopTexts


def read(pieces: Sequence[str], stops: Sequence[str]) -> tuple[str, str | None, list[str]]:
    """All that is given out, the stop text that was found, and the parts as they came."""
    watch = StopTexts(stops)
    parts: list[str] = []
    for piece in pieces:
        answer = watch.push(piece)
        if isinstance(answer, StopFound):
            parts.append(answer.text)
            return "".join(parts), answer.stop, parts
        parts.append(answer)
    parts.append(watch.flush())
    return "".join(parts), None, parts


def expected(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The rule, spelt out: the first to be complete, the longest of those."""
    for end in range(1, len(text) + 1):
        if complete := [stop for stop in stops if text[:end].endswith(stop)]:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


def longest_start_at_end(text: str, stops: Sequence[str]) -> int:
    return max(n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n]))


# Two letters, so that stop texts overlap themselves and each other all the time.
texts = st.text(alphabet="ab", max_size=24)
stop_lists = st.lists(st.text(alphabet="ab", min_size=1, max_size=6), min_size=1, max_size=4)


@given(pieces=st.lists(texts, max_size=8), stops=stop_lists)
def test_any_cut_of_any_text_gives_what_the_rule_says(pieces: list[str], stops: list[str]) -> None:
    given_out, found, _ = read(pieces, stops)
    assert (given_out, found) == expected("".join(pieces), stops)


@given(pieces=st.lists(texts, max_size=8), stops=stop_lists)
def test_only_what_could_still_become_a_stop_text_is_held_back(
    pieces: list[str], stops: list[str]
) -> None:
    watch, seen, given_out = StopTexts(stops), "", ""
    for piece in pieces:
        answer = watch.push(piece)
        if isinstance(answer, StopFound):
            break
        seen, given_out = seen + piece, given_out + answer
        assert given_out == seen[: len(seen) - longest_start_at_end(seen, stops)]


@pytest.mark.parametrize(
    ("pieces", "stop", "text"),
    [
        (["br", "own", " f", "ox", " jumps"], "own fox", "br"),
        (["alpha beta ga", "mma delta"], "beta gamma", "alpha "),
        (["one two three four fi", "ve six"], "five", "one two three four "),
    ],
)
def test_a_stop_text_across_pieces(pieces: list[str], stop: str, text: str) -> None:
    assert read(pieces, [stop])[:2] == (text, stop)


def test_a_stop_text_that_never_comes_delays_nothing() -> None:
    pieces = list("the end of the story is near, and nothing is held back")
    text, found, parts = read(pieces, ["x" * 40])
    assert parts == [*pieces, ""]
    assert (text, found) == ("".join(pieces), None)


def test_the_stop_text_is_part_of_the_output_if_wanted() -> None:
    watch = StopTexts(["five"], include_in_output=True)
    assert watch.push("four fi") == "four "
    assert watch.push("ve six") == StopFound("five", "five")


def test_a_long_stop_text_costs_nothing_until_it_appears() -> None:
    watch = StopTexts(["a" * 1_000_000])
    assert [watch.push("aab") for _ in range(1000)] == ["aab"] * 1000


def test_without_stop_texts_everything_passes() -> None:
    watch = StopTexts([])
    assert watch.push("anything") == "anything"
    assert watch.flush() == ""
