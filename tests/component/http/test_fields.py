"""Every field of a request: with a real model it changes the answer in its way, or must not."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import httpx
import pytest

from tests.support.asking import CHAT, COMPLETIONS, body_of, both, texts_of, whole
from tests.support.http_server import MODEL

Answer: TypeAlias = dict[str, Any]
OPENING = "Once upon a time, there was a little girl named Lily."
END_ID = 2


def content(answer: Answer) -> list[Any]:
    """All that is said, without ids and times."""
    return [answer["choices"], num_tokens(answer), answer["usage"]["prompt_tokens"]]


def num_tokens(answer: Answer) -> int:
    number: int = answer["usage"]["completion_tokens"]
    return number


def text(answer: Answer) -> str:
    return texts_of(answer)[0]


def token_ids(answer: Answer) -> list[int]:
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


def num_repeats(answer: Answer) -> int:
    return num_tokens(answer) - len(set(token_ids(answer)))


@dataclass(frozen=True, slots=True)
class Seen:
    """What a test compares."""

    greedy: Answer
    """To the prompt alone."""
    without: Answer
    """To the request without the field."""
    answer: Answer


Check: TypeAlias = Callable[[Seen], None]


def changes(seen: Seen) -> None:
    assert text(seen.answer) != text(seen.without)


def changes_nothing(seen: Seen) -> None:
    assert content(seen.answer) == content(seen.without)


def is_greedy(seen: Seen) -> None:
    """One token is left at each place, whatever the temperature."""
    assert text(seen.without) != text(seen.greedy)
    assert content(seen.answer) == content(seen.greedy)


def ends_after(number: int) -> Check:
    def check(seen: Seen) -> None:
        assert num_tokens(seen.answer) == number != num_tokens(seen.without)

    return check


def repeats_less(seen: Seen) -> None:
    assert num_repeats(seen.answer) < num_repeats(seen.without)


def repeats_more(seen: Seen) -> None:
    assert num_repeats(seen.answer) > num_repeats(seen.without)


def adds(*names: str) -> Check:
    """The same text, and something beside it that was not there."""

    def check(seen: Seen) -> None:
        assert texts_of(seen.answer) == texts_of(seen.without)
        for name in names:
            assert any(name in part for part in (seen.answer, seen.answer["choices"][0]))
            parts = (seen.without, seen.without["choices"][0])
            assert not any(part.get(name) for part in parts)

    return check


def _has_two_choices(seen: Seen) -> None:
    first, second = seen.answer["choices"]
    assert seen.without["choices"] == [first]
    assert second["index"] == 1
    assert texts_of(seen.answer)[1] != texts_of(seen.answer)[0]
    usage, before = seen.answer["usage"], seen.without["usage"]
    assert usage["prompt_tokens"] == before["prompt_tokens"]
    assert usage["completion_tokens"] == 2 * before["completion_tokens"]


def _begins_with_the_prompt(seen: Seen) -> None:
    assert text(seen.answer) == OPENING + text(seen.without)


def _ends_before_the_stop(seen: Seen) -> None:
    stop = seen.answer["choices"][0]["stop_reason"]
    assert stop == middle_of(seen.greedy)
    assert text(seen.without).startswith(text(seen.answer) + stop)
    assert stop not in text(seen.answer)


def _ends_with_the_stop(seen: Seen) -> None:
    assert text(seen.answer) == text(seen.without) + middle_of(seen.greedy)


def _shows_special_tokens(seen: Seen) -> None:
    assert text(seen.without) == ""
    assert text(seen.answer) in (3 * "</s>", 3 * "<|im_end|>")


def _uses_allowed_tokens(seen: Seen) -> None:
    allowed = {300, 301, 302}
    assert set(token_ids(seen.answer)) <= allowed
    assert not set(token_ids(seen.without)) <= allowed


def _says_one_token(seen: Seen) -> None:
    assert token_ids(seen.answer) == [300] * NUM_TOKENS


def _says_other_tokens(seen: Seen) -> None:
    assert not set(token_ids(seen.answer)) & set(token_ids(seen.greedy))


def _holds_the_end_off(seen: Seen) -> None:
    assert (num_tokens(seen.without), num_tokens(seen.answer)) == (1, 6)
    assert END_ID not in token_ids(seen.answer)[:5]


def _goes_on_past_the_end(seen: Seen) -> None:
    assert (num_tokens(seen.without), num_tokens(seen.answer)) == (1, NUM_TOKENS)


def _has_a_shorter_prompt(seen: Seen) -> None:
    assert seen.answer["usage"]["prompt_tokens"] == 4 < seen.without["usage"]["prompt_tokens"]
    changes(seen)


def _finds_nothing(seen: Seen) -> None:
    """The request without it has filled the cache, under no salt."""
    changes_nothing(seen)
    assert seen.answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def _has_alternatives(seen: Seen) -> None:
    before, after = (
        answer["choices"][0]["logprobs"]["content"] for answer in (seen.without, seen.answer)
    )
    assert [entry["logprob"] for entry in before] == [entry["logprob"] for entry in after]
    assert {len(entry["top_logprobs"]) for entry in before} == {0}
    assert {len(entry["top_logprobs"]) for entry in after} == {3}


def middle_of(greedy: Answer) -> str:
    """A few characters that the greedy answer holds."""
    said = text(greedy)
    return said[len(said) // 2 :][:3]


def biases_against(greedy: Answer) -> dict[str, int]:
    """All that the greedy answer says."""
    return {str(token_id): -100 for token_id in token_ids(greedy)}


NUM_TOKENS = 24
BOTH = (COMPLETIONS, CHAT)
ENDS_AT_ONCE = {"logit_bias": {str(END_ID): 100}}
RANDOM = {"temperature": 1.5, "seed": 7}
FEW_TOKENS = {"allowed_token_ids": list(range(300, 330))}


@dataclass(frozen=True, slots=True)
class Effect:
    """What one field does to an answer. A value that is a function is one of the greedy answer."""

    name: str
    value: Any
    check: Check = changes
    beside: dict[str, Any] = field(default_factory=dict)
    """Other fields, in both requests."""
    paths: tuple[str, ...] = BOTH


EFFECTS = [
    Effect("model", MODEL, changes_nothing),
    Effect("prompt", "Tom had a red ball.", paths=(COMPLETIONS,)),
    Effect("messages", [{"role": "user", "content": "Tom had a red ball."}], paths=(CHAT,)),
    Effect("max_tokens", 5, ends_after(5)),
    Effect("max_completion_tokens", 5, ends_after(5), paths=(CHAT,)),
    Effect("n", 2, _has_two_choices, {**RANDOM, "ignore_eos": True}),
    Effect("temperature", 1.5, beside={"seed": 7}),
    Effect("top_p", 0.001, is_greedy, RANDOM),
    Effect("top_k", 1, is_greedy, RANDOM),
    Effect("min_p", 1.0, is_greedy, RANDOM),
    Effect("seed", 8, beside=RANDOM),
    Effect("stop", middle_of, _ends_before_the_stop),
    Effect("include_stop_str_in_output", True, _ends_with_the_stop, {"stop": middle_of}),
    Effect("stop_token_ids", list(range(3, 512)), ends_after(1)),
    *(
        Effect(name, value, check, FEW_TOKENS)
        for name, more, less in (
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
            ("repetition_penalty", 0.5, 3.0),
        )
        for value, check in ((more, repeats_more), (less, repeats_less))
    ),
    Effect("logit_bias", {"300": 100}, _says_one_token),
    Effect("logit_bias", biases_against, _says_other_tokens),
    Effect("min_tokens", 5, _holds_the_end_off, ENDS_AT_ONCE),
    Effect("ignore_eos", True, _goes_on_past_the_end, ENDS_AT_ONCE),
    Effect(
        "skip_special_tokens",
        False,
        _shows_special_tokens,
        {**ENDS_AT_ONCE, "ignore_eos": True, "max_tokens": 3},
    ),
    Effect("allowed_token_ids", [300, 301, 302], _uses_allowed_tokens),
    Effect("logprobs", 2, adds("logprobs"), paths=(COMPLETIONS,)),
    Effect("logprobs", True, adds("logprobs"), paths=(CHAT,)),
    Effect("top_logprobs", 3, _has_alternatives, {"logprobs": True}, (CHAT,)),
    Effect("prompt_logprobs", 1, adds("prompt_logprobs")),
    Effect(
        "return_token_ids",
        True,
        adds("token_ids", "prompt_token_ids"),
        {"return_token_ids": False},
    ),
    Effect("echo", True, _begins_with_the_prompt, paths=(COMPLETIONS,)),
    Effect("truncate_prompt_tokens", 4, _has_a_shorter_prompt),
    Effect("cache_salt", lambda greedy: greedy["id"], _finds_nothing),
    Effect("user", "somebody", changes_nothing),
    Effect("priority", 0, changes_nothing),
    Effect("response_format", {"type": "text"}, changes_nothing),
    Effect("tools", [], changes_nothing, paths=(CHAT,)),
    Effect("tool_choice", "none", changes_nothing, paths=(CHAT,)),
    Effect("add_generation_prompt", False, paths=(CHAT,)),
    Effect("continue_final_message", True, paths=(CHAT,)),
    Effect("chat_template_kwargs", {"ending": " He was sad"}, paths=(CHAT,)),
]


def of_greedy(fields: dict[str, Any], greedy: Answer) -> dict[str, Any]:
    return {name: value(greedy) if callable(value) else value for name, value in fields.items()}


@pytest.mark.parametrize(
    ("effect", "path"),
    [(effect, path) for effect in EFFECTS for path in effect.paths],
    ids=lambda value: value.name if isinstance(value, Effect) else value.rpartition("/")[2],
)
def test_fields(solo: httpx.Client, effect: Effect, path: str) -> None:
    prompt = body_of(path, OPENING, max_tokens=NUM_TOKENS, return_token_ids=True)
    greedy = whole(solo, path, prompt)
    base = prompt | of_greedy(effect.beside, greedy)
    without = whole(solo, path, base) if effect.beside else greedy
    answer = whole(solo, path, base | of_greedy({effect.name: effect.value}, greedy))
    effect.check(Seen(greedy, without, answer))


STREAMS: list[dict[str, Any]] = [
    {},
    {"n": 3, **RANDOM},
    {"stop": middle_of},
    {"stop": middle_of, "include_stop_str_in_output": True, "n": 2},
    {"return_token_ids": True, "prompt_logprobs": 2, "n": 2, **RANDOM},
    {"min_tokens": 10, **ENDS_AT_ONCE, "skip_special_tokens": False},
    {"max_tokens": 1},
]
RATED: dict[str, list[dict[str, Any]]] = {
    COMPLETIONS: [{"logprobs": 3, **fields} for fields in STREAMS]
    + [{"logprobs": 1, "echo": True, **fields} for fields in STREAMS]
    + [{"echo": True}, {"echo": True, "logprobs": 2, "max_tokens": 0}],
    CHAT: [{"logprobs": True, "top_logprobs": 2, **fields} for fields in STREAMS],
}


@pytest.mark.parametrize(
    ("path", "fields"),
    [(path, RATED[path][place]) for path in BOTH for place in (1, 4)]
    + [
        pytest.param(path, fields, marks=pytest.mark.full)
        for path in BOTH
        for fields in STREAMS + RATED[path]
    ],
)
def test_streams(solo: httpx.Client, path: str, fields: dict[str, Any]) -> None:
    """Joined, they are what is said at once: text, ratings, offsets, ids, usage."""
    prompt = body_of(path, OPENING, max_tokens=NUM_TOKENS)
    both(solo, path, prompt | of_greedy(fields, whole(solo, path, prompt)))
