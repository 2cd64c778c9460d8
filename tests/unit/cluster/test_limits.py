"""Every limit of the API: 400 with a message that names it, and the next request is fine."""

from typing import Any

import httpx
import pytest

from tests.support.http_server import HttpServer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "one two"}

# fields, the field that is to blame, words of the message
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": 2.5}, "temperature", "at most 2.0, not 2.5"),
    ({"temperature": -1}, "temperature", "at least 0.0, not -1"),
    ({"temperature": "hot"}, "temperature", "a number"),
    ({"temperature": True}, "temperature", "a number, not true"),
    ({"top_p": 0}, "top_p", "more than 0.0, not 0"),
    ({"top_p": 1.5}, "top_p", "at most 1.0, not 1.5"),
    ({"min_p": 2}, "min_p", "at most 1.0, not 2"),
    ({"top_k": -2}, "top_k", "at least -1, not -2"),
    ({"presence_penalty": 3}, "presence_penalty", "at most 2.0, not 3"),
    ({"frequency_penalty": -3}, "frequency_penalty", "at least -2.0, not -3"),
    ({"repetition_penalty": 0}, "repetition_penalty", "more than 0.0, not 0"),
    ({"n": 0}, "n", "at least 1, not 0"),
    ({"n": 129}, "n", "at most 128, not 129"),
    ({"n": "2"}, "n", "a whole number"),
    ({"max_tokens": 0}, "max_tokens", "at least 1, not 0"),
    ({"max_tokens": 5.5}, "max_tokens", "a whole number, not 5.5"),
    ({"max_tokens": 50_000}, "max_tokens", "50000, but the maximum context length"),
    ({"min_tokens": 30, "max_tokens": 20}, "min_tokens", "which is 20, not 30"),
    ({"stop": ["a"] * 5}, "stop", "at most 4 entries"),
    ({"stop": ["a", ""]}, "stop.1", "not be empty"),
    ({"stop": ""}, "stop", "not be empty"),
    ({"stop": 5}, "stop", "a list, not 5"),
    ({"stop_token_ids": [151645]}, "stop_token_ids", "151645; those of this model are 0 to 377"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "-1; those of this model are 0 to 377"),
    ({"allowed_token_ids": [378]}, "allowed_token_ids", "378; those of this model"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "not be empty"),
    ({"logit_bias": {"49152": -100, "99999": 5}}, "logit_bias", "49152; those of this model"),
    ({"logit_bias": {"AI": -100}}, "logit_bias", "one of its keys is no token id"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5", "at most 100.0, not 101"),
    ({"seed": 2**64}, "seed", "less than 18446744073709551616"),
    ({"cache_salt": "x" * 129}, "cache_salt", "at most 128 characters"),
    ({"priority": 5}, "priority", "riority is 5, but the scheduling policy is fcfs"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
    ({"stream": "yes"}, "stream", "true or false"),
    ({"logprobs": 2}, "logprobs", "not supported yet"),
]
CHAT_REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "not be empty"),
    ({"messages": [USER] * 1025}, "messages", "at most 1024 entries"),
    ({"messages": [{"content": "x"}]}, "messages.0.role", "is missing"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "a list, not 5"),
    ({"messages": [USER, {"role": "user"}]}, "messages.1.content", "is missing"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages.0.content",
        "reads text only",
    ),
    ({"max_completion_tokens": 50_000}, "max_completion_tokens", "maximum context length"),
    ({"tools": [{"type": "function"}]}, "tools", "not supported yet"),
    ({"response_format": {"type": "json_object"}}, "response_format", "not supported yet"),
    ({"response_format": {"type": "json_schema", "schema": {}}}, "response_format", "supported"),
    ({"chat_template_kwargs": {"messages": []}}, "messages", "may not set messages"),
]
COMPLETION_REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": ""}, "prompt", "prompt is empty"),
    ({"prompt": []}, "prompt", "not be empty"),
    ({"prompt": ["one", ""]}, "prompt", "prompt is empty"),
    ({"prompt": [[5], []]}, "prompt.1", "not be empty"),
    ({"prompt": [5, 378]}, "prompt", "378; those of this model"),
    ({"prompt": [5, -1]}, "prompt", "-1; those of this model"),
    ({"prompt": [5, 2**70]}, "prompt", "those of this model"),
    ({"prompt": [5, "x"]}, "prompt.1", "a whole number"),
    ({"prompt": {"a": 1}}, "prompt", "a text"),
    ({"prompt": None}, "prompt", "a text"),
    ({"prompt": ["x"] * 129, "n": 2}, "prompt", "258 sequences; one request may have 256"),
    ({"prompt": "x" * (4 << 20) + "x"}, "prompt", "4194305 bytes of text; at most 4194304"),
    ({"echo": True}, "echo", "not supported yet"),
    ({"suffix": "x"}, "suffix", "not supported yet"),
]


def check_refused(
    http: httpx.Client, path: str, body: dict[str, Any], param: str, words: str
) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert words in error["message"]
    assert len(answer.content) < 2000


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED)
def test_both_endpoints(http: httpx.Client, fields: dict[str, Any], param: str, words: str) -> None:
    check_refused(http, COMPLETIONS, {"prompt": "one two", **fields}, param, words)
    check_refused(http, CHAT, {"messages": [USER], **fields}, param, words)


@pytest.mark.parametrize(("fields", "param", "words"), CHAT_REFUSED)
def test_chat(http: httpx.Client, fields: dict[str, Any], param: str, words: str) -> None:
    check_refused(http, CHAT, {"messages": [USER], **fields}, param, words)


@pytest.mark.parametrize(("fields", "param", "words"), COMPLETION_REFUSED)
def test_completions(http: httpx.Client, fields: dict[str, Any], param: str, words: str) -> None:
    check_refused(http, COMPLETIONS, {"prompt": "one two", **fields}, param, words)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}, "tools": [], "tool_choice": "none"},
        {"logprobs": None, "top_logprobs": 0, "n": 1, "user": "somebody"},
        {"logprobs": False, "functions": [], "best_of": 1, "bad_words": []},
        {"never_heard_of": {"a": [1]}, "stop": None, "stop_token_ids": []},
        {"seed": -(2**63)},
        {"temperature": 2, "top_p": 1, "top_k": 0, "min_p": 1},
    ],
)
def test_neutral_and_unknown_fields_are_no_error(
    http: httpx.Client, fields: dict[str, Any]
) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "one two"}), (CHAT, {"messages": [USER]})):
        answer = http.post(path, json={**body, **fields})
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("content", "headers", "words"),
    [
        (b"{", {"content-type": "application/json"}, "no valid JSON"),
        (b"", {"content-type": "application/json"}, "is missing"),
        (b'{"prompt": "x"}', {"content-type": "text/plain"}, "an object"),
        (b"[1]", {"content-type": "application/json"}, "an object"),
        (b'{"prompt": "\\ud800"}', {"content-type": "application/json"}, "surrogate"),
        (
            b'{"prompt": "x", "cache_salt": "\\ud800"}',
            {"content-type": "application/json"},
            "surrogate",
        ),
        (
            b'{"prompt": "x", "model": "\\ud800"}',
            {"content-type": "application/json"},
            "surrogate",
        ),
        (b'{"prompt": "x", "temperature": NaN}', {"content-type": "application/json"}, "number"),
    ],
)
def test_bodies_that_are_none(
    http: httpx.Client, content: bytes, headers: dict[str, str], words: str
) -> None:
    for path in (COMPLETIONS, CHAT):
        answer = http.post(path, content=content, headers=headers)
        assert answer.status_code == 400, answer.text
    answer = http.post(COMPLETIONS, content=content, headers=headers)
    assert words in answer.json()["error"]["message"]


def test_a_message_that_is_no_text(http: httpx.Client) -> None:
    content = b'{"messages": [{"role": "user", "content": "\\udc00", "name": "\\ud800"}]}'
    answer = http.post(CHAT, content=content, headers={"content-type": "application/json"})
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
