"""What is logged of requests: one line each, with their id, and nothing of what they say."""

import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from cluster.engine_spec import EngineSpec
from cluster.logs import set_up_logging
from configs import Config, ServerConfig
from tests.support.asking import COMPLETIONS
from tests.support.http_server import http_server, parrot
from tests.support.parrot import Parrot

CANARY = "canary"


@pytest.fixture(autouse=True)
def _own_handlers() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def logged(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    lines = capsys.readouterr().err.splitlines()
    assert not any(CANARY in line for line in lines)
    return [json.loads(line) for line in lines]


def test_one_line_for_a_request(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging(ServerConfig(log_format="json"))
    with http_server() as server, httpx.Client(base_url=server.url) as client:
        logged(capsys)
        for path, status in (
            ("/health", 200),
            (COMPLETIONS, 200),
            (COMPLETIONS, 400),
            ("/nothing", 404),
        ):
            body = {"prompt": CANARY, "n": 1 if status == 200 else 0}
            method = "GET" if path == "/health" else "POST"
            headers = {"x-request-id": f"id-{status}"}
            answer = client.request(method, path, json=body, headers=headers)
            assert answer.status_code == status
        server.wait_idle()
        lines = [line for line in logged(capsys) if line["logger"] == "cluster.asgi"]
    assert [(line["request_id"], line["path"], line["status"]) for line in lines] == [
        ("id-200", COMPLETIONS, 200),
        ("id-400", COMPLETIONS, 400),
        ("id-404", "/nothing", 404),
    ]
    for line in lines:
        assert line["level"] == "INFO"
        assert line["seconds"] >= 0
        assert line["time"].endswith("Z")


def test_what_goes_wrong_within_a_request_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging(ServerConfig(log_format="json", log_level="error"))
    model = parrot()
    assert isinstance(model.worker, Parrot)
    with http_server(model=model) as server, httpx.Client(base_url=server.url) as client:
        server.codec.words.word = None  # type: ignore[method-assign,assignment]
        body = {"prompt": CANARY, "logprobs": 1, "stream": True}
        answer = client.post(COMPLETIONS, json=body, headers={"x-request-id": "broken"})
        assert "The server made a mistake" in answer.text
        server.wait_idle()
        [line] = logged(capsys)
    assert (line["request_id"], line["level"]) == ("broken", "ERROR")
    assert "TypeError" in line["exc_info"]


def test_probes_are_lines_for_the_curious(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging(ServerConfig(log_level="debug"))
    with http_server() as server:
        httpx.get(f"{server.url}/health", headers={"x-request-id": "probe"})
    [line] = [line for line in capsys.readouterr().err.splitlines() if "/health: 200" in line]
    assert line.endswith("[probe]")


def test_setting_up_again_changes_the_form(capsys: pytest.CaptureFixture[str]) -> None:
    for server in (ServerConfig(), ServerConfig(log_level="warning", log_format="json")):
        set_up_logging(server)
    logging.getLogger("cluster").info("unseen")
    logging.getLogger("cluster").warning("seen")
    [line] = logged(capsys)
    assert line["message"] == "seen"
    assert "request_id" not in line


def test_another_level_is_no_reason_for_another_engine() -> None:
    quiet = EngineSpec.of(Config(server=ServerConfig(log_level="error")))
    loud = EngineSpec.of(Config(server=ServerConfig(log_level="debug", log_format="json")))
    assert quiet.fingerprint == loud.fingerprint
    assert loud.config.server.log_level == "debug"
    other = EngineSpec.of(Config(server=ServerConfig(drain_seconds=2.0)))
    assert other.fingerprint != quiet.fingerprint
