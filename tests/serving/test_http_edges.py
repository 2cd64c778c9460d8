"""What surrounds the answers: ids, keys, probes, models, queues, clients that go away."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from starlette.types import Message, Scope

from cluster.asgi import KeyDigests
from cluster.http_settings import HttpSettings
from configs import Config, SchedulerConfig
from tests.support.events import Stream
from tests.support.http_server import MODEL, HttpServer, http_server, parrot
from tests.support.metrics import scrape
from tests.support.parrot import Parrot

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ENDLESS = {"prompt": "one two three", "max_tokens": 1500, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def slow() -> Iterator[HttpServer]:
    """20 ms a step and two places, so that requests can be met while they run or wait."""
    config = Config(scheduler=SchedulerConfig(max_num_seqs=2, max_waiting_requests=3))
    with http_server(config, step_seconds=0.02) as running:
        yield running


@pytest.fixture
def slow_http(slow: HttpServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=slow.url, timeout=30) as client:
        yield client
    slow.wait_idle()


# -- clients that go away ----------------------------------------------------------------


def test_a_stream_whose_client_leaves_ends(slow_http: httpx.Client, slow: HttpServer) -> None:
    with slow_http.stream("POST", COMPLETIONS, json={**ENDLESS, "stream": True}) as answer:
        lines = answer.iter_lines()
        next(lines)
    slow.wait_idle()


def test_an_answer_whose_client_leaves_ends(slow_http: httpx.Client, slow: HttpServer) -> None:
    with pytest.raises(httpx.ReadTimeout):
        slow_http.post(COMPLETIONS, json=ENDLESS, timeout=0.3)
    slow.wait_idle()


def test_requests_that_wait_end_with_their_clients(
    slow_http: httpx.Client, slow: HttpServer
) -> None:
    with slow_http.stream("POST", COMPLETIONS, json={**ENDLESS, "n": 4, "stream": True}) as answer:
        lines = answer.iter_lines()
        next(lines)
    slow.wait_idle()
    with pytest.raises(httpx.ReadTimeout):
        slow_http.post(COMPLETIONS, json={**ENDLESS, "n": 4}, timeout=0.3)
    slow.wait_idle()


def new_scope() -> Scope:
    return {
        "type": "http",
        "method": "POST",
        "path": COMPLETIONS,
        "headers": [(b"content-type", b"application/json")],
        "query_string": b"",
        "state": {},
    }


def test_a_client_that_leaves_in_the_middle_of_its_body_sent_no_bad_request(
    slow: HttpServer,
) -> None:
    messages: list[Message] = [
        {"type": "http.disconnect"},
        {"type": "http.request", "body": b'{"prompt": "one', "more_body": True},
    ]
    sent: list[Message] = []

    async def receive() -> Message:
        return messages.pop()

    async def send(message: Message) -> None:
        sent.append(message)

    async def run() -> None:
        await slow.app(new_scope(), receive, send)

    slow.run(run)
    assert [message.get("status") for message in sent] == [499, None]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("num_turns", range(8))
def test_a_request_may_be_cancelled_twice(slow: HttpServer, stream: bool, num_turns: int) -> None:
    """Ray Serve tells of a client that is gone and cancels the request, in one order or the other,
    with some turns of the event loop between."""
    body = json.dumps({**ENDLESS, "stream": stream}).encode()

    async def run() -> None:
        gone = asyncio.Event()
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, object]:
            if messages:
                return messages.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: object) -> None:
            pass

        request = asyncio.ensure_future(slow.app(new_scope(), receive, send))
        while not slow.engine.client.num_streams:
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        gone.set()
        for _ in range(num_turns):
            await asyncio.sleep(0)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)

    slow.run(run)
    slow.wait_idle()


# -- queues ------------------------------------------------------------------------------


@pytest.fixture
def occupied(slow: HttpServer) -> Iterator[None]:
    """Both places are taken, and three more requests wait."""
    with httpx.Client(base_url=slow.url, timeout=30) as client:
        body = {**ENDLESS, "n": 2, "stream": True}
        waiting = {**body, "n": 3}
        with client.stream("POST", COMPLETIONS, json=body) as running:
            lines = running.iter_lines()
            next(lines)
            with client.stream("POST", COMPLETIONS, json=waiting):
                yield
    slow.wait_idle()


@pytest.mark.usefixtures("occupied")
def test_a_full_queue_says_when_to_come_back(slow: HttpServer) -> None:
    answer = httpx.post(f"{slow.url}{COMPLETIONS}", json=ENDLESS)
    assert answer.status_code == 429
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert answer.json()["error"]["code"] == "queue_full"
    assert "of at most 3" in answer.json()["error"]["message"]


@pytest.mark.usefixtures("occupied")
def test_probes_answer_whatever_the_load(slow: HttpServer) -> None:
    with httpx.Client(base_url=slow.url) as client:
        began = time.monotonic()
        assert client.get("/health").status_code == 200
        assert client.get("/ready").json() == {"status": "ready", "reason": None}
        assert time.monotonic() - began < 10, "the load takes thirty"


def test_who_waits_too_long_is_told_so() -> None:
    config = Config(scheduler=SchedulerConfig(max_num_seqs=1))
    settings = HttpSettings(keep_alive_seconds=0.1)
    with (
        http_server(config, settings=settings, step_seconds=0.02, max_queue_seconds=1) as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
    ):
        body = {**ENDLESS, "stream": True}
        with client.stream("POST", COMPLETIONS, json=body) as first:
            lines = first.iter_lines()
            next(lines)
            answer = client.post(COMPLETIONS, json=ENDLESS)
            assert answer.status_code == 503
            assert "waited for 1 seconds" in answer.json()["error"]["message"]
            assert int(answer.headers["retry-after"]) >= 1
            with client.stream("POST", COMPLETIONS, json=body) as second:
                stream = Stream().read(second.iter_lines())
        assert stream.error is not None
        assert stream.error["type"] == "service_unavailable_error"
        assert stream.num_comments >= 2  # while it waited
        server.wait_idle()
        assert ends_of(server) == {"error": 2, "abort": 1}


def test_a_client_that_does_not_read_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.event_stream.SEND_SECONDS", 0.5)
    with http_server(max_model_len=200_000, num_blocks=20_000) as server:
        body = {**ENDLESS, "max_tokens": 150_000, "stream": True}
        with httpx.stream("POST", f"{server.url}{COMPLETIONS}", json=body, timeout=30):
            # Sockets hold some megabytes. Then the server waits, and then it has enough.
            server.wait_idle(timeout_seconds=60)
            finished = server.run(server.engine.actor.status).counters
        assert finished is not None
        assert finished.finished == {"abort": 1}


# -- ids and keys ------------------------------------------------------------------------


def test_a_request_has_an_id(http: httpx.Client) -> None:
    ids = {http.get("/health").headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3


@pytest.mark.parametrize(
    ("given", "kept"),
    [("abc-1.2_X", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("ä", False)],
)
def test_the_id_of_the_client_is_kept_if_it_is_one(
    http: httpx.Client, given: str, kept: bool
) -> None:
    headers = [(b"x-request-id", given.encode())]
    answer = http.post(COMPLETIONS, json={"n": 0}, headers=headers)
    assert answer.status_code == 400
    assert (answer.headers["x-request-id"] == given) is kept


def test_two_requests_with_the_same_id_are_both_served(slow: HttpServer) -> None:
    answers: list[httpx.Response] = []

    def ask() -> None:
        body = {"prompt": "one two three", "temperature": 0}
        headers = {"x-request-id": "same"}
        answers.append(httpx.post(f"{slow.url}{COMPLETIONS}", json=body, headers=headers))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [a.json()["choices"][0]["text"] for a in answers] == ["one two three"] * 2
    assert {a.headers["x-request-id"] for a in answers} == {"same"}


@pytest.fixture(scope="module")
def locked() -> Iterator[HttpServer]:
    keys = KeyDigests.of(["first-key", "second-key"])
    with http_server(settings=HttpSettings(api_keys=keys)) as running:
        yield running


@pytest.mark.parametrize("key", ["first-key", "second-key"])
def test_a_key_lets_in(locked: HttpServer, key: str) -> None:
    headers = {"authorization": f"Bearer {key}"}
    answer = httpx.get(f"{locked.url}/v1/models", headers=headers)
    assert answer.status_code == 200


@pytest.mark.parametrize("header", [None, "Bearer", "Bearer first", "Basic first-key", "first-key"])
@pytest.mark.parametrize("path", ["/v1/models", "/version", "/docs", "/nothing/here"])
def test_without_a_key_there_is_nothing(locked: HttpServer, header: str | None, path: str) -> None:
    headers = {} if header is None else {"authorization": header}
    answer = httpx.get(f"{locked.url}{path}", headers=headers)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert "x-request-id" in answer.headers


def test_probes_need_no_key(locked: HttpServer) -> None:
    for path in ("/health", "/ready"):
        assert httpx.get(f"{locked.url}{path}").status_code == 200


def test_one_key_may_fill_half_of_the_queue() -> None:
    keys = KeyDigests.of(["first", "second"])
    settings = HttpSettings(api_keys=keys, max_waiting_requests=8)
    config = Config(scheduler=SchedulerConfig(max_num_seqs=1, max_waiting_requests=8))
    with http_server(config, settings=settings, step_seconds=0.02) as server:
        first, second = (
            httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {key}"})
            for key in ("first", "second")
        )
        body = {**ENDLESS, "stream": True}
        with first, second, first.stream("POST", COMPLETIONS, json=body) as running:
            lines = running.iter_lines()
            next(lines)  # from here on it waits no more
            with first.stream("POST", COMPLETIONS, json={**body, "n": 4}) as waiting:
                assert waiting.status_code == 200
                answer = first.post(COMPLETIONS, json=body)
                assert answer.status_code == 429
                assert "one key may have 4, half of the queue" in answer.text
                with second.stream("POST", COMPLETIONS, json={**body, "n": 4}) as other:
                    assert other.status_code == 200
            deadline = time.monotonic() + 2
            while server.engine.client.num_streams > 1 and time.monotonic() < deadline:
                time.sleep(0.01)
            with first.stream("POST", COMPLETIONS, json={**body, "n": 4}) as again:
                assert again.status_code == 200
        server.wait_idle()


def test_digests_do_not_contain_the_keys() -> None:
    digests = KeyDigests.of(["a-secret"])
    assert "a-secret" not in repr(digests)
    assert KeyDigests.of(["a-secret"]) != digests  # another salt
    assert (digests.match("a-secret"), digests.match("b-secret")) == (0, None)


# -- models, paths, engines that are not there -------------------------------------------


def test_models(http: httpx.Client) -> None:
    (card,) = http.get("/v1/models").json()["data"]
    assert card["id"] == MODEL
    assert card["max_model_len"] == 2048
    assert http.get(f"/v1/models/{MODEL}").json() == card


@pytest.mark.parametrize("name", ["gpt-5", "org/model"])
def test_a_model_that_is_not_served(http: httpx.Client, name: str) -> None:
    message = f"The model `{name}` does not exist."
    for answer in (
        http.get(f"/v1/models/{name}"),
        http.post(COMPLETIONS, json={"model": name, "prompt": "x"}),
        http.post(CHAT, json={"model": name, "messages": [{"role": "user", "content": "x"}]}),
    ):
        assert answer.status_code == 404
        assert answer.json()["error"]["message"] == message
        assert answer.json()["error"]["code"] == "model_not_found"


def test_paths_and_methods_that_there_are_not(http: httpx.Client) -> None:
    answer = http.get("/v1/nothing")
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == "There is nothing at /v1/nothing."
    assert http.get(COMPLETIONS).status_code == 405
    assert http.get("/version").json()["version"]


def test_an_error_of_the_engine_fails_one_request_only() -> None:
    model = parrot()
    assert isinstance(model.worker, Parrot)
    with http_server(model=model) as server, httpx.Client(base_url=server.url) as client:
        model.worker.fail_with = "the sampler met a number that is none"
        for stream in (False, True):
            answer = client.post(COMPLETIONS, json={**ENDLESS, "n": 2, "stream": stream})
            assert "the sampler met a number that is none" in answer.text
            if stream:
                assert Stream().read(answer.text.split("\n")).error is not None
            else:
                assert answer.status_code == 500
                assert answer.json()["error"]["type"] == "server_error"
        model.worker.fail_with = None
        answer = client.post(COMPLETIONS, json={"prompt": "one", "temperature": 0})
        assert answer.json()["choices"][0]["text"] == "one"
        server.wait_idle()
        assert ends_of(server) == {"error": 4, "stop": 1}


def test_an_engine_that_is_lost_leaves_nobody_waiting() -> None:
    with http_server(step_seconds=0.01) as server, httpx.Client(base_url=server.url) as client:
        with client.stream("POST", COMPLETIONS, json={**ENDLESS, "stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.run(lambda: server.engine.actor.give_up("the test pulled the plug"))
            stream = Stream().read(["", *lines])
        assert stream.error is not None
        assert "the test pulled the plug" in stream.error["message"]
        answer = client.post(COMPLETIONS, json={"prompt": "one"})
        assert answer.status_code == 503
        assert "the test pulled the plug" in answer.json()["error"]["message"]
        assert int(answer.headers["retry-after"]) > 0
        for path in ("/health", "/ready"):
            answer = client.get(path)
            assert answer.status_code == 503
            assert "the test pulled the plug" in answer.json()["reason"]


def test_health_answers_while_a_large_prompt_is_tokenized(http: httpx.Client) -> None:
    """CASES 16."""
    prompt = "The quick brown fox jumps over the lazy dog. " * 23_000
    num_answers = 0
    with ThreadPoolExecutor(1) as executor, httpx.Client(base_url=http.base_url) as client:
        post = executor.submit(http.post, COMPLETIONS, json={"prompt": prompt})
        while not post.done():
            assert client.get("/health").status_code == 200
            num_answers += 1
    assert num_answers > 5, "tokenizing holds everybody up"
    assert post.result().status_code == 400
    assert "maximum context length" in post.result().json()["error"]["message"]
    assert http.post(COMPLETIONS, json={"prompt": "one two"}).status_code == 200


def ends_of(server: HttpServer) -> dict[str, float]:
    """How many choices ended for which reason, as the metrics tell it."""
    return scrape(server.url, MODEL).nonzero("requests_total")
