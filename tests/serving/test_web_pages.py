"""Scripts of web pages (CORS), aliases of the model, and what the server says of its load."""

from collections.abc import Iterator

import httpx
import pytest

from cluster.asgi import KeyDigests
from cluster.http_settings import HttpSettings
from configs import Config, SchedulerConfig
from tests.support.asking import COMPLETIONS
from tests.support.http_server import HttpServer, http_server

FRIEND, STRANGER = "https://friend.example", "https://stranger.example"


@pytest.fixture(scope="module")
def open_to_friends() -> Iterator[HttpServer]:
    settings = HttpSettings(allowed_origins=(FRIEND,), api_keys=KeyDigests.of(["key", "other-key"]))
    with http_server(settings=settings) as server:
        yield server


def preflight(server: HttpServer, origin: str) -> httpx.Response:
    headers = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, content-type",
    }
    return httpx.options(f"{server.url}{COMPLETIONS}", headers=headers)


def test_a_browser_asks_first_and_needs_no_key_for_that(open_to_friends: HttpServer) -> None:
    answer = preflight(open_to_friends, FRIEND)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == FRIEND
    assert "authorization" in answer.headers["access-control-allow-headers"]
    assert "x-request-id" in answer.headers
    answer = preflight(open_to_friends, STRANGER)
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(("key", "status"), [("key", 200), ("wrong", 401)])
def test_the_page_may_read_the_answer_also_an_error(
    open_to_friends: HttpServer, key: str, status: int
) -> None:
    headers = {"origin": FRIEND, "authorization": f"Bearer {key}"}
    url = f"{open_to_friends.url}{COMPLETIONS}"
    answer = httpx.post(url, json={"prompt": "one"}, headers=headers)
    assert answer.status_code == status
    assert answer.headers["access-control-allow-origin"] == FRIEND
    assert "x-request-id" in answer.headers["access-control-expose-headers"]


def test_no_page_may_unless_it_was_allowed(http: httpx.Client, server: HttpServer) -> None:
    answer = http.post(COMPLETIONS, json={"prompt": "one"}, headers={"origin": FRIEND})
    assert "access-control-allow-origin" not in answer.headers
    assert preflight(server, FRIEND).status_code == 405


def test_aliases() -> None:
    with (
        http_server(model_names=("first", "second")) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        cards = client.get("/v1/models").json()["data"]
        assert [(card["id"], card["root"]) for card in cards] == [
            ("first", "first"),
            ("second", "first"),
        ]
        for name in ("first", "second"):
            assert client.get(f"/v1/models/{name}").json()["id"] == name
            answer = client.post(COMPLETIONS, json={"prompt": "one", "model": name})
            assert answer.json()["model"] == "first"
        answer = client.post(COMPLETIONS, json={"prompt": "one", "model": "third"})
        assert answer.status_code == 404
        assert answer.json()["error"]["message"] == "The model `third` does not exist."


def test_load() -> None:
    config = Config(scheduler=SchedulerConfig(max_num_seqs=1))
    with (
        http_server(config, step_seconds=0.02) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        assert client.get("/load").json()["server_load"] == 0
        body = {"prompt": "one", "max_tokens": 500, "ignore_eos": True, "n": 3, "stream": True}
        with client.stream("POST", COMPLETIONS, json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            load = client.get("/load").json()
        assert (load["running_requests"], load["waiting_requests"]) == (1, 2)
        assert load["server_load"] == 3
        assert load["waiting_tokens"] == 2
        assert load["capacity_tokens"] == 1024 * 16
        server.wait_idle()


def test_the_description_tells_of_the_errors_that_there_are(http: httpx.Client) -> None:
    described = http.get("/openapi.json").json()
    for path in (COMPLETIONS, "/tokenize"):
        responses = described["paths"][path]["post"]["responses"]
        assert {"200", "400", "404", "429", "503"} <= responses.keys()
        assert "422" not in responses
        content = responses["400"]["content"]["application/json"]["schema"]
        assert content == {"$ref": "#/components/schemas/ErrorBody"}
    assert "/abort" not in described["paths"]  # without an admin key
