"""Every limit of the API: 400 with a message that names it, and the next request is fine."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.support.asking import CHAT, COMPLETIONS
from tests.support.http_server import HttpServer, http_server

USER = {"role": "user", "content": "one two"}
ON_BOTH, ON_CHAT, ON_COMPLETIONS = (COMPLETIONS, CHAT), (CHAT,), (COMPLETIONS,)
CONTEXT_TOKENS = 2048
SMALL_POOL_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Limit:
    """A request that goes beyond one."""

    fields: dict[str, Any]
    param: str | None
    """The field that is to blame."""
    words: str
    """Of the message."""
    paths: tuple[str, ...] = ON_BOTH
    is_small: bool = False
    """Meant for the server whose whole pool is smaller than a context."""


LIMITS = [
    # lengths
    Limit(
        {"prompt": [9] * 2048}, "prompt", "is 2048 tokens, and your prompt has 2048", ON_COMPLETIONS
    ),
    Limit(
        {"prompt": [9] * 2049}, "prompt", "is 2048 tokens, and your prompt has 2049", ON_COMPLETIONS
    ),
    Limit({"max_tokens": 50_000}, "max_tokens", "50000, but the maximum context length"),
    Limit(
        {"max_tokens": 2049},
        "max_tokens",
        "2049, but the maximum context length of this model is 2048",
    ),
    Limit(
        {"max_completion_tokens": 2049}, "max_completion_tokens", "maximum context length", ON_CHAT
    ),
    Limit(
        {"prompt": [9] * 129},
        "prompt",
        "129 tokens, and the whole KV cache holds 128",
        ON_COMPLETIONS,
        is_small=True,
    ),
    Limit(
        {"max_tokens": 1000, "ignore_eos": True},
        "prompt",
        "the whole cache holds 128",
        is_small=True,
    ),
    Limit({"prompt": ""}, "prompt", "prompt is empty", ON_COMPLETIONS),
    Limit({"prompt": []}, "prompt", "not be empty", ON_COMPLETIONS),
    Limit({"prompt": ["one", ""]}, "prompt", "prompt is empty", ON_COMPLETIONS),
    Limit({"prompt": [[5], []]}, "prompt.1", "not be empty", ON_COMPLETIONS),
    Limit(
        {"prompt": "x" * ((4 << 20) + 1)},
        "prompt",
        "4194305 bytes of text; at most 4194304",
        ON_COMPLETIONS,
    ),
    Limit(
        {"messages": [{**USER, "content": "x" * ((4 << 20) + 1)}]},
        "messages",
        "at most 4194304",
        ON_CHAT,
    ),
    Limit({"messages": []}, "messages", "not be empty", ON_CHAT),
    Limit({"messages": [USER] * 1025}, "messages", "at most 1024 entries", ON_CHAT),
    Limit({"max_tokens": 0}, "max_tokens", "at least 1, not 0"),
    Limit({"max_tokens": -1}, "max_tokens", "not -1"),
    Limit({"max_tokens": 5.5}, "max_tokens", "a whole number, not 5.5"),
    Limit({"max_completion_tokens": 0}, "max_completion_tokens", "at least 1, not 0", ON_CHAT),
    Limit({"min_tokens": 30, "max_tokens": 20}, "min_tokens", "which is 20, not 30"),
    Limit({"min_tokens": -1}, "min_tokens", "at least 0, not -1"),
    Limit(
        {"echo": True, "max_tokens": 0, "min_tokens": 1},
        "min_tokens",
        "which is 0, not 1",
        ON_COMPLETIONS,
    ),
    Limit({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1, or -1"),
    Limit({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "at least -1, not -2"),
    # how many
    Limit({"n": 0}, "n", "at least 1, not 0"),
    Limit({"n": 129}, "n", "at most 128, not 129"),
    Limit({"n": "2"}, "n", "a whole number"),
    Limit(
        {"prompt": ["x"] * 129, "n": 2},
        "prompt",
        "258 sequences; one request may have 256",
        ON_COMPLETIONS,
    ),
    Limit({"prompt": ["x"] * 257}, "prompt", "at most 256 entries", ON_COMPLETIONS),
    # token ids
    Limit({"prompt": [5, 378]}, "prompt", "378; those of this model", ON_COMPLETIONS),
    Limit({"prompt": [5, -1]}, "prompt", "-1; those of this model", ON_COMPLETIONS),
    Limit({"prompt": [5, 2**70]}, "prompt", "those of this model", ON_COMPLETIONS),
    Limit(
        {"stop_token_ids": [151645]}, "stop_token_ids", "151645; those of this model are 0 to 377"
    ),
    Limit({"stop_token_ids": [-1]}, "stop_token_ids", "-1; those of this model are 0 to 377"),
    Limit({"allowed_token_ids": [378]}, "allowed_token_ids", "378; those of this model"),
    Limit({"allowed_token_ids": [-1]}, "allowed_token_ids", "-1; those of this model"),
    Limit({"allowed_token_ids": []}, "allowed_token_ids", "not be empty"),
    Limit({"logit_bias": {"49152": -100, "99999": 5}}, "logit_bias", "49152; those of this model"),
    Limit({"logit_bias": {"AI": -100}}, "logit_bias", "one of its keys is no token id"),
    Limit({"logit_bias": {"-1": 1}}, "logit_bias", "one of its keys is no token id"),
    Limit({"logit_bias": {"5": 101}}, "logit_bias.5", "at most 100.0, not 101"),
    # sampling
    Limit({"temperature": 2.5}, "temperature", "at most 2.0, not 2.5"),
    Limit({"temperature": -1}, "temperature", "at least 0.0, not -1"),
    Limit({"temperature": "hot"}, "temperature", "a number"),
    Limit({"temperature": True}, "temperature", "a number, not true"),
    Limit({"top_p": 0}, "top_p", "more than 0.0, not 0"),
    Limit({"top_p": 1.5}, "top_p", "at most 1.0, not 1.5"),
    Limit({"min_p": 2}, "min_p", "at most 1.0, not 2"),
    Limit({"min_p": -0.1}, "min_p", "at least 0.0, not -0.1"),
    Limit({"top_k": -2}, "top_k", "at least -1, not -2"),
    Limit({"presence_penalty": 3}, "presence_penalty", "at most 2.0, not 3"),
    Limit({"frequency_penalty": -3}, "frequency_penalty", "at least -2.0, not -3"),
    Limit({"repetition_penalty": 0}, "repetition_penalty", "at least 0.0001, not 0"),
    Limit({"repetition_penalty": 1e39}, "repetition_penalty", "at most 10000.0, not 1e+39"),
    Limit({"seed": 2**64}, "seed", "less than 18446744073709551616"),
    # ratings
    Limit({"logprobs": 21}, "logprobs", "at most 20, not 21", ON_COMPLETIONS),
    Limit({"logprobs": -1}, "logprobs", "at least 0, not -1", ON_COMPLETIONS),
    Limit({"logprobs": True}, "logprobs", "a whole number, not true", ON_COMPLETIONS),
    Limit({"logprobs": 2}, "logprobs", "true or false, not 2", ON_CHAT),
    Limit({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "at most 20, not 21", ON_CHAT),
    Limit({"top_logprobs": 2}, "top_logprobs", "goes with logprobs: true only", ON_CHAT),
    Limit({"prompt_logprobs": 21}, "prompt_logprobs", "at most 20, not 21"),
    Limit({"prompt_logprobs": -1}, "prompt_logprobs", "at least 0, not -1"),
    # stops and words
    Limit({"stop": ["a"] * 5}, "stop", "at most 4 entries"),
    Limit({"stop": ["a", ""]}, "stop.1", "not be empty"),
    Limit({"stop": ""}, "stop", "not be empty"),
    Limit({"stop": 5}, "stop", "a list, not 5"),
    Limit({"bad_words": ["a"] * 129}, "bad_words", "at most 128 entries"),
    Limit({"bad_words": [""]}, "bad_words.0", "not be empty"),
    Limit({"bad_words": "x"}, "bad_words", "a list"),
    Limit({"cache_salt": "x" * 129}, "cache_salt", "at most 128 characters"),
    Limit({"priority": 5}, "priority", "riority is 5, but the scheduling policy is fcfs"),
    # what would take long
    Limit(
        {"logit_bias": {str(i): 1 for i in range(16_385)}}, "logit_bias", "at most 16384 entries"
    ),
    Limit({"stop_token_ids": [5] * 262_145}, "stop_token_ids", "at most 262144 entries"),
    Limit({"allowed_token_ids": [5] * 262_145}, "allowed_token_ids", "at most 262144 entries"),
    Limit({"prompt": [5] * 1_048_577}, "prompt", "at most 1048576 entries", ON_COMPLETIONS),
    Limit({"bad_words": ["x" * 129]}, "bad_words.0", "at most 128 characters"),
    Limit(
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 4097}]},
        "messages",
        "messages have 4097 content parts, of at most 4096 together",
        ON_CHAT,
    ),
    # forms
    Limit({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
    Limit({"stream": "yes"}, "stream", "true or false"),
    Limit({"echo": "yes"}, "echo", "true or false", ON_COMPLETIONS),
    Limit({"return_token_ids": 1}, "return_token_ids", "true or false, not 1"),
    Limit({"prompt": [5, "x"]}, "prompt.1", "a whole number", ON_COMPLETIONS),
    Limit({"prompt": {"a": 1}}, "prompt", "a text", ON_COMPLETIONS),
    Limit({"prompt": None}, "prompt", "a text", ON_COMPLETIONS),
    Limit({"messages": [{"content": "x"}]}, "messages.0.role", "is missing", ON_CHAT),
    Limit(
        {"messages": [{"role": "user", "content": 5}]},
        "messages.0.content",
        "a list, not 5",
        ON_CHAT,
    ),
    Limit({"messages": [USER, {"role": "user"}]}, "messages.1.content", "is missing", ON_CHAT),
    Limit(
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages.0.content",
        "reads text only",
        ON_CHAT,
    ),
    Limit({"echo": True}, "echo", "completions only", ON_CHAT),
    Limit({"chat_template_kwargs": {"messages": []}}, "messages", "may not set messages", ON_CHAT),
    Limit(
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
        "set one of them to false",
        ON_CHAT,
    ),
    # not built
    Limit({"response_format": {"type": "json_object"}}, "response_format", "not supported yet"),
    Limit(
        {"response_format": {"type": "json_schema", "schema": {"type": "object"}}},
        "response_format",
        "not supported yet",
    ),
    Limit({"tools": [{"type": "function"}]}, "tools", "not supported yet", ON_CHAT),
    Limit({"tool_choice": "required"}, "tool_choice", "not supported yet", ON_CHAT),
    Limit({"functions": [{"name": "f"}]}, "functions", "not supported yet", ON_CHAT),
    Limit({"suffix": "x"}, "suffix", "not supported yet", ON_COMPLETIONS),
    Limit({"best_of": 2}, "best_of", "not supported yet"),
]


@pytest.fixture(scope="module")
def small() -> Iterator[HttpServer]:
    with http_server(num_blocks=SMALL_POOL_TOKENS // 16 + 1) as server:
        yield server


def body_on(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [USER], **fields} if path == CHAT else {"prompt": "one two", **fields}


@pytest.mark.parametrize(
    ("limit", "path"),
    [(limit, path) for limit in LIMITS for path in limit.paths],
    ids=lambda value: value.param if isinstance(value, Limit) else value.rpartition("/")[2],
)
def test_limits(http: httpx.Client, small: HttpServer, limit: Limit, path: str) -> None:
    url = f"{small.url}{path}" if limit.is_small else path
    answer = http.post(url, json=body_on(path, limit.fields))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == limit.param
    assert limit.words in error["message"]
    assert len(answer.content) < 2000
    assert http.post(url, json=body_on(path, {"max_tokens": 2})).status_code == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}, "tools": [], "tool_choice": "none"},
        {"logprobs": None, "top_logprobs": 0, "n": 1, "user": "somebody"},
        {"logprobs": False, "functions": [], "best_of": 1, "bad_words": []},
        {"never_heard_of": {"a": [1]}, "stop": None, "stop_token_ids": []},
        {"seed": -(2**63), "echo": False, "priority": 0},
        {"temperature": 2, "top_p": 1, "top_k": 0, "min_p": 1},
    ],
)
def test_neutral_and_unknown_fields_are_no_error(
    http: httpx.Client, fields: dict[str, Any]
) -> None:
    for path in ON_BOTH:
        answer = http.post(path, json=body_on(path, fields))
        assert answer.status_code == 200, answer.text


JSON_HEADERS = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("content", "param", "words"),
    [
        (b'{"prompt": "a"', None, "is no valid JSON: Expecting ',' delimiter, at character 14."),
        (b'{"prompt": "\xff"}', None, "it must be JSON in UTF-8"),
        (b'{"prompt": ' + b"[" * 5000, None, "nested at most some hundred levels deep"),
        (b"", None, "is missing"),
        (b"[1]", None, "an object"),
        (b'{"prompt": "\\ud800"}', "prompt", "surrogate"),
        (b'{"prompt": "x", "cache_salt": "\\ud800"}', "cache_salt", "surrogate"),
        (b'{"prompt": "x", "model": "\\ud800"}', "model", "surrogate"),
        (b'{"prompt": "x", "temperature": NaN}', "temperature", "number"),
    ],
)
def test_bodies_that_are_none(
    http: httpx.Client, content: bytes, param: str | None, words: str
) -> None:
    assert http.post(CHAT, content=content, headers=JSON_HEADERS).status_code == 400
    answer = http.post(COMPLETIONS, content=content, headers=JSON_HEADERS)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], words in error["message"]) == (param, True), error


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_json_that_is_not_called_so(http: httpx.Client, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    answer = http.post(COMPLETIONS, content=b'{"prompt": "x"}', headers=headers)
    assert answer.status_code == 400
    assert "the header Content-Type: application/json" in answer.json()["error"]["message"]


def test_the_name_of_a_field_is_not_sent_back_at_any_length(http: httpx.Client) -> None:
    answer = http.post(COMPLETIONS, json={"prompt": "x", "logit_bias": {"k" * 1_000_000: "x"}})
    assert answer.status_code == 400
    assert len(answer.content) < 2000


def test_a_message_that_is_no_text(http: httpx.Client) -> None:
    content = b'{"messages": [{"role": "user", "content": "\\udc00", "name": "\\ud800"}]}'
    answer = http.post(CHAT, content=content, headers=JSON_HEADERS)
    assert answer.status_code == 400
    assert "surrogate" in answer.json()["error"]["message"]


def test_the_context_length(http: httpx.Client, server: HttpServer) -> None:
    """CASES 14: with a context of L, prompts of L + 1 and L are refused, L - 1 gives one token."""
    length = 2048
    token_id = server.encode("on")[0]
    for num_tokens in (length + 1, length):
        answer = http.post(COMPLETIONS, json={"prompt": [token_id] * num_tokens})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert f"{length} tokens, and your prompt has {num_tokens}" in error["message"]
        assert error["code"] == "context_length_exceeded"
    answer = http.post(COMPLETIONS, json={"prompt": [token_id] * (length - 1), "max_tokens": 9})
    assert answer.json()["usage"]["completion_tokens"] == 1
    assert answer.json()["choices"][0]["finish_reason"] == "length"


def test_many_malformed_messages_get_a_short_answer(http: httpx.Client) -> None:
    """CASES 13."""
    answer = http.post(CHAT, json={"messages": [{"role": 5, "content": {}}] * 1000})
    assert answer.status_code == 400
    assert len(answer.content) < 2000


def test_bad_requests_do_not_stand_in_the_way_of_good_ones(http: httpx.Client) -> None:
    """CASES 15."""
    for _ in range(50):
        assert http.post(COMPLETIONS, json={"prompt": "x", "n": 0}).status_code == 400
    assert http.post(COMPLETIONS, json={"prompt": "one two"}).status_code == 200


def test_a_body_over_the_limit(http: httpx.Client) -> None:
    body = b'{"prompt": "' + b"x" * (16 << 20) + b'"}'
    headers = {"content-type": "application/json"}
    answer = http.post(COMPLETIONS, content=body, headers=headers)
    assert answer.status_code == 413
    assert "16777216 bytes" in answer.json()["error"]["message"]
    chunks = (body[start : start + (1 << 20)] for start in range(0, len(body), 1 << 20))
    answer = http.post(COMPLETIONS, content=chunks, headers=headers)  # without a length
    assert answer.status_code == 413


@pytest.mark.parametrize(
    ("path", "part"),
    [
        (COMPLETIONS, b'"prompt": [' + b"1," * 2_500_000 + b"1]"),
        (COMPLETIONS, b'"prompt": [' + b"[1]," * 1_000_000 + b"[1]]"),
        (COMPLETIONS, b'"prompt": "x", "y": {' + b'"a":1,' * 700_000 + b'"b":1}'),
        (CHAT, b'"messages": [' + b'{"role":1},' * 250_000 + b"{}]"),
    ],
)
def test_bodies_of_too_many_parts_are_not_even_read(
    http: httpx.Client, path: str, part: bytes
) -> None:
    """Reading them would stop everybody's streams for seconds."""
    headers = {"content-type": "application/json"}
    answer = http.post(path, content=b"{" + part + b"}", headers=headers)
    assert answer.status_code == 413, answer.text[:200]
    assert "too many parts" in answer.json()["error"]["message"]


def test_a_text_of_4_megabytes_may_be_json_or_a_table(http: httpx.Client) -> None:
    record = '{"name": "Lily", "age": 5, "likes": ["cats", "dogs"], "id": 12345678},\n'
    for line in (record, "1.5,2.5,3.5,4.5\n", "def f(x: int) -> dict: return {x: [x]}\n"):
        text = line * ((4 << 20) // len(line))
        answer = http.post("/tokenize", json={"prompt": text}, timeout=100)
        assert answer.status_code == 200, answer.text[:200]
