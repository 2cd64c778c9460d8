"""A server that is told to stop: what runs goes on while there is time, and then ends clearly."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.asking import COMPLETIONS
from tests.support.events import Stream
from tests.support.http_server import HttpServer, http_server

REASON = "the test drains it"
ENDLESS = {"prompt": "one two three", "max_tokens": 1500, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def server() -> Iterator[HttpServer]:
    with http_server(step_seconds=0.005) as server:
        yield server


@pytest.fixture
def client(server: HttpServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


def set_drain(server: HttpServer, reason: str) -> None:
    server.run(lambda: server.engine.actor.set_drain(reason))
    state = "draining" if reason else "ready"
    while httpx.get(f"{server.url}/ready").json()["status"] != state:
        pass


def assert_refused(client: httpx.Client, reason: str = REASON) -> None:
    for path in (COMPLETIONS, "/ready"):
        body = {"prompt": "one"}
        answer = client.get(path) if path == "/ready" else client.post(path, json=body)
        assert answer.status_code == 503
        assert reason in answer.text
    refused = client.post(COMPLETIONS, json=body)
    assert int(refused.headers["retry-after"]) > 0
    assert refused.json()["error"]["type"] == "service_unavailable_error"
    assert client.get("/ready").json()["status"] == "draining"
    assert client.get("/health").status_code == 200


def begun(client: httpx.Client, **fields: Any) -> Any:
    return client.stream("POST", COMPLETIONS, json={**ENDLESS, "stream": True, **fields})


def test_what_runs_and_what_waits_goes_on_and_nothing_new_is_taken(
    server: HttpServer, client: httpx.Client
) -> None:
    with begun(client, max_tokens=100, n=80) as answer:  # more than run at a time
        lines = answer.iter_lines()
        first = next(lines)
        set_drain(server, REASON)
        assert_refused(client)
        stream = Stream().read([first, *lines])
    assert stream.finishes == dict.fromkeys(range(80), "length")
    server.run(server.engine.actor.wait_drained)
    set_drain(server, "")
    assert client.post(COMPLETIONS, json={"prompt": "one"}).status_code == 200
    assert client.get("/ready").status_code == 200


@pytest.mark.parametrize("by", ["engine", "replica"])
def test_what_is_left_ends_with_the_reason(
    server: HttpServer, client: httpx.Client, by: str
) -> None:
    """By the whole engine, and by one replica of it that has no more time."""
    with begun(client) as answer:
        lines = answer.iter_lines()
        first = next(lines)
        if by == "engine":
            set_drain(server, REASON)
            assert server.run(lambda: server.engine.actor.end_all(REASON)) == 1
        else:
            server.run(lambda: _leave(server))
        stream = Stream().read([first, *lines])
        assert stream.error is not None
        assert stream.error["message"] == f"The request was ended: {REASON}."
        assert stream.error["type"] == "service_unavailable_error"
        assert not stream.finishes
    assert_refused(client)
    server.wait_idle()


async def _leave(server: HttpServer) -> None:
    server.engine.client.leave(REASON)


def test_an_answer_that_is_not_streamed_ends_with_503(
    server: HttpServer, client: httpx.Client
) -> None:
    async def end_soon() -> None:
        while not server.engine.client.info().running_requests:
            await asyncio.sleep(0.002)
        await server.engine.actor.set_drain(REASON)
        await server.engine.actor.end_all(REASON)

    ending = threading.Thread(target=lambda: server.run(end_soon))
    ending.start()
    answer = client.post(COMPLETIONS, json=ENDLESS)
    ending.join()
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) > 0
    assert answer.json()["error"]["message"] == f"The request was ended: {REASON}."
