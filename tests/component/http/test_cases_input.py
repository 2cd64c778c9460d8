"""CASES 9 to 16 over HTTP: bad input costs its sender, and nobody else."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.support.asking import CHAT, COMPLETIONS, body_of, whole
from tests.support.http_server import HttpServer

CONTEXT_TOKENS = 2048
USER = {"role": "user", "content": "Once upon a time"}


def refused(solo: httpx.Client, path: str, **fields: Any) -> dict[str, Any]:
    """The error; the request after it is served."""
    answer = solo.post(path, json=body_of(path, "Once upon a time", **fields))
    assert answer.status_code == 400, answer.text
    assert len(answer.content) < 64 << 10
    assert whole(solo, path, body_of(path, "Once upon a time", max_tokens=2))
    error: dict[str, Any] = answer.json()["error"]
    assert error["message"]
    return error


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("bias", [{"49152": -100, "99999": 5}, {"AI": -100}, {"512": 1}])
def test_case_9_logit_bias_beyond_the_vocabulary(
    solo: httpx.Client, path: str, bias: dict[str, float]
) -> None:
    assert refused(solo, path, logit_bias=bias)["param"] == "logit_bias"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_case_10_a_stop_token_beyond_the_vocabulary(solo: httpx.Client, path: str) -> None:
    error = refused(solo, path, stop_token_ids=[151645])
    assert error["param"] == "stop_token_ids"
    assert "151645" in error["message"]


def test_case_11_a_long_list_of_allowed_tokens(solo: httpx.Client) -> None:
    allowed = [3 + place % 400 for place in range(2000)]
    body = body_of(COMPLETIONS, "Once", allowed_token_ids=allowed, max_tokens=5)
    assert whole(solo, COMPLETIONS, body)["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_case_12_a_response_format_of_the_wrong_shape(solo: httpx.Client, path: str) -> None:
    wrong = {"type": "json_schema", "schema": {"type": "object"}}
    assert refused(solo, path, response_format=wrong)["param"] == "response_format"


def test_case_13_thousands_of_malformed_messages(solo: httpx.Client) -> None:
    for number in (1000, 2000):
        refused(
            solo, CHAT, messages=[{"role": 5, "content": {"x": [1]}, "more": "y" * 50}] * number
        )


def test_case_14_the_edge_of_the_context(solo: httpx.Client) -> None:
    for num_tokens in (CONTEXT_TOKENS + 1, CONTEXT_TOKENS):
        error = refused(solo, COMPLETIONS, prompt=[300] * num_tokens)
        assert f"{CONTEXT_TOKENS} tokens, and your prompt has {num_tokens}" in error["message"]
    body = {**body_of(COMPLETIONS, ""), "prompt": [300] * (CONTEXT_TOKENS - 1)}
    answer = whole(solo, COMPLETIONS, body)
    assert answer["usage"]["completion_tokens"] == 1
    assert answer["choices"][0]["finish_reason"] == "length"
    assert "50000" in refused(solo, COMPLETIONS, max_tokens=50_000)["message"]


def test_case_15_many_bad_requests_and_a_good_one(solo: httpx.Client) -> None:
    for _ in range(50):
        assert solo.post(COMPLETIONS, json={"prompt": "x", "n": 0}).status_code == 400
    whole(solo, COMPLETIONS, body_of(COMPLETIONS, "Once", max_tokens=2))


@pytest.mark.full
def test_case_16_health_answers_while_large_prompts_are_tokenized(
    solo: httpx.Client, roomy: HttpServer
) -> None:
    prompt = "Once upon a time there was a dog. " * 30_000
    slowest_seconds = 0.0
    with ThreadPoolExecutor(3) as executor, httpx.Client(base_url=roomy.url, timeout=30) as probe:
        posts = [executor.submit(solo.post, COMPLETIONS, json={"prompt": prompt}) for _ in range(3)]
        while not all(post.done() for post in posts):
            began = time.monotonic()
            assert probe.get("/health").status_code == 200
            slowest_seconds = max(slowest_seconds, time.monotonic() - began)
    assert 0 < slowest_seconds < 1
    for post in posts:
        assert post.result().status_code == 400
        assert "maximum context length" in post.result().json()["error"]["message"]
    whole(solo, COMPLETIONS, body_of(COMPLETIONS, "Once", max_tokens=2))
