"""The last value within each limit of the API is served. What goes beyond one is refused in
tests/serving/test_limits.py."""

import json
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.component.http.conftest import TightServer
from tests.support.asking import CHAT, COMPLETIONS, body_of, whole

ON_BOTH, ON_CHAT, ON_COMPLETIONS = (COMPLETIONS, CHAT), (CHAT,), (COMPLETIONS,)
CONTEXT_TOKENS = 2048
LAST_ID = 511
MAX_TEXT_BYTES = 4 << 20
MAX_BODY_BYTES = 16 << 20
ENDS_AT_ONCE = {"logit_bias": {"2": 100}}
SHORT = {"truncate_prompt_tokens": 4}
"""For prompts that are within their own limit, and beyond the context."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A request that goes as far as it may. One token is made for each of its choices."""

    name: str
    fields: dict[str, Any]
    paths: tuple[str, ...] = ON_BOTH
    num_choices: int = 1


def _messages(number: int, content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}] * number}


BOUNDS = [
    # lengths
    Bound("prompt", {"prompt": [9] * (CONTEXT_TOKENS - 1)}, ON_COMPLETIONS),
    Bound("max_tokens", {"max_tokens": CONTEXT_TOKENS, **ENDS_AT_ONCE}),
    Bound(
        "max_completion_tokens", {"max_completion_tokens": CONTEXT_TOKENS, **ENDS_AT_ONCE}, ON_CHAT
    ),
    Bound("prompt_bytes", {"prompt": "x" * MAX_TEXT_BYTES, **SHORT}, ON_COMPLETIONS),
    Bound("message_bytes", {**_messages(1, "x" * MAX_TEXT_BYTES), **SHORT}, ON_CHAT),
    Bound("prompt_ids", {"prompt": [5] * (1 << 20), **SHORT}, ON_COMPLETIONS),
    Bound("messages", {**_messages(1024, "x"), **SHORT}, ON_CHAT),
    Bound("parts", {**_messages(1, [{"type": "text", "text": "x"}] * 4096), **SHORT}, ON_CHAT),
    Bound("min_tokens", {"min_tokens": 1, "max_tokens": 1}),
    Bound("truncate_prompt_tokens", {"truncate_prompt_tokens": 1}),
    Bound("truncate_prompt_tokens", {"truncate_prompt_tokens": -1}),
    # how many
    Bound("n", {"n": 128}, num_choices=128),
    Bound("sequences", {"prompt": ["x"] * 128, "n": 2}, ON_COMPLETIONS, 256),
    Bound("prompts", {"prompt": ["x"] * 256}, ON_COMPLETIONS, 256),
    # token ids
    Bound("prompt", {"prompt": [0, LAST_ID]}, ON_COMPLETIONS),
    Bound("stop_token_ids", {"stop_token_ids": [0, LAST_ID]}),
    Bound("stop_token_ids", {"stop_token_ids": [5] * (1 << 18)}),
    Bound("allowed_token_ids", {"allowed_token_ids": [0, LAST_ID]}),
    Bound("allowed_token_ids", {"allowed_token_ids": [5] * (1 << 18)}),
    Bound("logit_bias", {"logit_bias": {"0": -100, str(LAST_ID): 100}}),
    # sampling
    Bound("temperature", {"temperature": 0}),
    Bound("temperature", {"temperature": 2}),
    Bound("top_p", {"temperature": 1, "top_p": 5e-324}),
    Bound("top_p", {"temperature": 1, "top_p": 1}),
    Bound("min_p", {"temperature": 1, "min_p": 0}),
    Bound("min_p", {"temperature": 1, "min_p": 1}),
    Bound("top_k", {"temperature": 1, "top_k": -1}),
    Bound("top_k", {"temperature": 1, "top_k": 2**63}),
    Bound("presence_penalty", {"presence_penalty": -2}),
    Bound("presence_penalty", {"presence_penalty": 2}),
    Bound("frequency_penalty", {"frequency_penalty": -2}),
    Bound("frequency_penalty", {"frequency_penalty": 2}),
    Bound("repetition_penalty", {"repetition_penalty": 0.0001}),
    Bound("repetition_penalty", {"repetition_penalty": 10_000}),
    Bound("seed", {"temperature": 1, "seed": -(2**63)}),
    Bound("seed", {"temperature": 1, "seed": 2**64 - 1}),
    # ratings
    Bound("logprobs", {"logprobs": 0}, ON_COMPLETIONS),
    Bound("logprobs", {"logprobs": 20}, ON_COMPLETIONS),
    Bound("top_logprobs", {"logprobs": True, "top_logprobs": 20}, ON_CHAT),
    Bound("prompt_logprobs", {"prompt_logprobs": 20}),
    # stops and words
    Bound("stop", {"stop": ["a", "b", "c", "d"]}),
    Bound("bad_words", {"bad_words": [f"word {number}" for number in range(128)]}),
    Bound("bad_words", {"bad_words": ["x" * 128]}),
    Bound("cache_salt", {"cache_salt": "x" * 128}),
]


@pytest.mark.parametrize(
    ("bound", "path"),
    [(bound, path) for bound in BOUNDS for path in bound.paths],
    ids=lambda value: value.name if isinstance(value, Bound) else value.rpartition("/")[2],
)
def test_the_last_value_within_a_limit(solo: httpx.Client, bound: Bound, path: str) -> None:
    answer = whole(solo, path, body_of(path, "Once", **{"max_tokens": 1, **bound.fields}))
    assert len(answer["choices"]) == bound.num_choices
    assert answer["usage"]["completion_tokens"] == bound.num_choices


@pytest.mark.parametrize(
    ("num_bytes", "status"), [(MAX_BODY_BYTES, 200), (MAX_BODY_BYTES + 1, 413)]
)
def test_the_size_of_a_body(solo: httpx.Client, num_bytes: int, status: int) -> None:
    content = json.dumps({"prompt": "Once", "max_tokens": 1}).ljust(num_bytes)
    headers = {"content-type": "application/json"}
    assert solo.post(COMPLETIONS, content=content, headers=headers).status_code == status


@pytest.mark.parametrize(("num_prompt_tokens", "max_tokens"), [(128, 1), (100, 29)])
def test_what_fills_the_whole_pool(
    squeezed: TightServer, num_prompt_tokens: int, max_tokens: int
) -> None:
    """The last token needs no slot."""
    body = {"prompt": [9] * num_prompt_tokens, "max_tokens": max_tokens, "ignore_eos": True}
    with squeezed(8) as server, httpx.Client(base_url=server.url, timeout=30) as client:
        answer = whole(client, COMPLETIONS, body)
        server.wait_idle()
    assert answer["usage"]["completion_tokens"] == max_tokens
