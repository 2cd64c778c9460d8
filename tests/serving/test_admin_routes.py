"""Administration: there only with a key of its own, and for requests of any replica."""

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from cluster.asgi import KeyDigests
from cluster.http_settings import HttpSettings
from configs import Config, SchedulerConfig
from tests.support.asking import COMPLETIONS
from tests.support.events import Stream
from tests.support.http_server import HttpServer, http_server

ENDLESS = {"prompt": "one two three", "max_tokens": 1500, "ignore_eos": True, "temperature": 0}
ADMIN = {"authorization": "Bearer admin-key"}
CLIENT = {"authorization": "Bearer client-key"}


@pytest.fixture(scope="module")
def managed() -> Iterator[HttpServer]:
    settings = HttpSettings(
        api_keys=KeyDigests.of(["client-key"]), admin_key=KeyDigests.of(["admin-key"])
    )
    config = Config(scheduler=SchedulerConfig(max_num_seqs=2))
    with http_server(config, settings=settings, step_seconds=0.01) as server:
        yield server


@pytest.fixture
def client(managed: HttpServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=managed.url, timeout=30, headers=CLIENT) as client:
        yield client
    managed.wait_idle()


def opened(client: httpx.Client, **fields: Any) -> Any:
    request_id = fields.pop("request_id", "theirs")
    return client.stream(
        "POST",
        COMPLETIONS,
        json={**ENDLESS, "stream": True, **fields},
        headers={"x-request-id": request_id},
    )


def abort(managed: HttpServer, *ids: str) -> int:
    answer = httpx.post(f"{managed.url}/abort", json={"request_ids": ids}, headers=ADMIN)
    assert answer.status_code == 200, answer.text
    num_aborted: int = answer.json()["aborted"]
    return num_aborted


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/abort"])
@pytest.mark.parametrize("headers", [{}, CLIENT, {"authorization": "Bearer admin"}])
def test_only_the_admin_key_lets_in(managed: HttpServer, path: str, headers: Any) -> None:
    answer = httpx.post(f"{managed.url}{path}", json={"request_ids": ["x"]}, headers=headers)
    assert answer.status_code == 401
    assert "admin key" in answer.json()["error"]["message"]


def test_the_admin_key_is_no_key_of_a_client(managed: HttpServer) -> None:
    answer = httpx.post(f"{managed.url}{COMPLETIONS}", json={"prompt": "one"}, headers=ADMIN)
    assert answer.status_code == 401


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/abort"])
def test_without_an_admin_key_there_is_nothing(http: httpx.Client, path: str) -> None:
    answer = http.post(path, json={"request_ids": ["x"]}, headers=ADMIN)
    assert answer.status_code == 404


def test_reset_prefix_cache(client: httpx.Client, managed: HttpServer) -> None:
    body = {"prompt": "one two three four five " * 10, "max_tokens": 1, "temperature": 0}

    def cached_tokens() -> int:
        usage = client.post(COMPLETIONS, json=body).json()["usage"]
        found: int = usage["prompt_tokens_details"]["cached_tokens"]
        return found

    cached_tokens()
    assert cached_tokens() > 0
    url = f"{managed.url}/reset_prefix_cache"
    with opened(client) as answer:
        lines = answer.iter_lines()
        next(lines)
        refused = httpx.post(url, headers=ADMIN)
        assert refused.status_code == 400
        assert re.search(r"\d+ blocks are held", refused.json()["error"]["message"])
        assert abort(managed, "theirs") == 1
        list(lines)
    managed.wait_idle()
    assert httpx.post(url, headers=ADMIN).json() == {"reset": True}
    assert cached_tokens() == 0


def test_abort_by_the_id_of_the_answer(client: httpx.Client, managed: HttpServer) -> None:
    with opened(client, n=2) as answer:
        lines = iter(answer.iter_lines())
        first = next(lines)
        answer_id = first.split('"id":"')[1].split('"')[0]
        assert abort(managed, "cmpl-0", answer_id) == 2
        stream = Stream().read([first, *lines])
    assert stream.finishes == {0: "abort", 1: "abort"}
    assert stream.error is None


def test_a_header_id_ends_all_that_carry_it_also_what_waits(
    client: httpx.Client, managed: HttpServer
) -> None:
    with (
        opened(client, n=2, request_id="same") as running,
        opened(client, request_id="same") as waiting,
    ):
        lines = running.iter_lines()
        first = next(lines)
        with opened(client, request_id="other", max_tokens=5) as other:
            assert abort(managed, "same") == 3
            assert Stream().read([first, *lines]).finishes == {0: "abort", 1: "abort"}
            assert Stream().read(waiting.iter_lines()).finishes == {0: "abort"}
            assert Stream().read(other.iter_lines()).finishes == {0: "length"}


@pytest.mark.parametrize("body", [{}, {"request_ids": []}, {"request_ids": [5]}])
def test_mistakes(managed: HttpServer, body: Any) -> None:
    answer = httpx.post(f"{managed.url}/abort", json=body, headers=ADMIN)
    assert answer.status_code == 400
