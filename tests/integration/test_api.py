"""What the API has beside text, through Ray Serve, a scheduler actor and a worker actor."""

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.asking import COMPLETIONS, body_of, both, whole
from tests.support.events import Stream
from tests.support.serving import ADMIN_KEY, ORIGIN, App, session_logs

# Starting an engine may take longer than any of the tests.
pytestmark = pytest.mark.timeout(func_only=True)

OPENING = "Once upon a time, there was a little girl named Lily."
ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}
ENDLESS = {"max_tokens": 1500, "ignore_eos": True, "stream": True}


@pytest.fixture
def client(roomy: App) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=roomy.url, timeout=60) as client:
        yield client
    roomy.wait_idle()


def test_ratings_and_ids(client: httpx.Client) -> None:
    fields: dict[str, Any] = {"logprobs": 2, "echo": True, "return_token_ids": True, "n": 2}
    answer, _ = both(client, COMPLETIONS, body_of(COMPLETIONS, OPENING, max_tokens=10, **fields))
    tokens = client.post("/tokenize", json={"prompt": OPENING}).json()["tokens"]
    for choice in answer["choices"]:
        assert choice["prompt_token_ids"] == tokens
        assert len(choice["logprobs"]["tokens"]) == len(tokens) + len(choice["token_ids"])
        assert choice["text"].startswith(OPENING)
    assert answer["model"] == "first"


def test_administration(client: httpx.Client, roomy: App) -> None:
    body = body_of(COMPLETIONS, OPENING, **ENDLESS)
    headers = {"x-request-id": "to-be-ended"}
    with client.stream("POST", COMPLETIONS, json=body, headers=headers) as answer:
        lines = answer.iter_lines()
        first = next(lines)
        refused = client.post("/reset_prefix_cache", headers=ADMIN)
        assert refused.status_code == 400
        message = refused.json()["error"]["message"]
        assert "blocks are held by running requests" in message
        assert "Traceback" not in message
        assert len(message) < 200
        assert client.post("/abort", json={"request_ids": ["to-be-ended"]}).status_code == 401
        ended = client.post("/abort", json={"request_ids": ["to-be-ended"]}, headers=ADMIN)
        assert ended.json() == {"aborted": 1}
        assert Stream().read([first, *lines]).finishes == {0: "abort"}
    roomy.wait_idle()
    assert client.post("/reset_prefix_cache", headers=ADMIN).json() == {"reset": True}
    usage = whole(client, COMPLETIONS, body_of(COMPLETIONS, OPENING, max_tokens=1))["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_page_may_ask(client: httpx.Client) -> None:
    body = body_of(COMPLETIONS, OPENING, max_tokens=1)
    answer = client.post(COMPLETIONS, json=body, headers={"origin": ORIGIN})
    assert answer.headers["access-control-allow-origin"] == ORIGIN


def test_logs_are_objects_with_the_id_of_the_request(client: httpx.Client) -> None:
    body = body_of(COMPLETIONS, OPENING, max_tokens=1)
    answer = client.post(COMPLETIONS, json=body, headers={"x-request-id": "seen-in-the-log"})
    assert answer.headers.get_list("x-request-id") == ["seen-in-the-log"]
    deadline = time.monotonic() + 10
    while not (found := _lines_with("seen-in-the-log")) and time.monotonic() < deadline:
        time.sleep(0.1)
    [line] = found
    assert (line["path"].endswith(COMPLETIONS), line["status"]) == (True, 200)


@pytest.mark.parametrize("given", ["a b", "x" * 129, "", "ä"])
@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_an_id_that_is_none_is_replaced(client: httpx.Client, given: str, encoding: str) -> None:
    """Also where Serve would fail with it."""
    headers = {b"x-request-id": given.encode(encoding), b"x-session-id": "ä".encode(encoding)}
    answer = client.post(COMPLETIONS, json={"n": 0}, headers=headers)
    assert answer.status_code == 400
    [request_id] = answer.headers.get_list("x-request-id")
    assert re.fullmatch(r"[0-9a-f-]{32,36}", request_id)


def _lines_with(request_id: str) -> list[dict[str, Any]]:
    lines = [
        line for path in session_logs() for line in path.read_text("utf-8", "replace").splitlines()
    ]
    found = [json.loads(line) for line in lines if request_id in line and line.startswith("{")]
    return [line for line in found if line.get("request_id") == request_id]
