"""What JSON cannot say of a rating, on every way by which ratings reach a client."""

import math
from typing import Any

import httpx
import pytest

from scheduler.messages import TokenLogprobs
from tests.support import parrot
from tests.support.asking import CHAT, COMPLETIONS, body_of, both
from tests.support.http_server import http_server

LOWEST = -9999.0


@pytest.fixture
def rated(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`rated(path, **fields)`: a choice of a model to which all that is said was impossible, and
    its answer."""
    row = TokenLogprobs(-math.inf, 1, ((50, -math.inf), (51, -20_000.0)))
    monkeypatch.setattr(parrot, "rate", lambda *_: row)

    def ask(path: str, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        with http_server() as server, httpx.Client(base_url=server.url, timeout=30) as client:
            answer, _ = both(client, path, body_of(path, "one two", max_tokens=2, **fields))
        return answer["choices"][0], answer

    return ask


def test_of_a_completion(rated: Any) -> None:
    choice, _ = rated(COMPLETIONS, logprobs=2, prompt_logprobs=2)
    assert choice["logprobs"]["token_logprobs"] == [LOWEST] * 2
    rows = [entry.values() for entry in choice["logprobs"]["top_logprobs"]]
    assert [set(row) for row in rows] == [{LOWEST}] * 2
    first, *others = choice["prompt_logprobs"]
    assert first is None
    assert others
    assert {entry["logprob"] for row in others for entry in row.values()} == {LOWEST}


def test_of_a_chat(rated: Any) -> None:
    choice, answer = rated(CHAT, logprobs=True, top_logprobs=2, prompt_logprobs=2)
    entries = choice["logprobs"]["content"]
    assert [entry["logprob"] for entry in entries] == [LOWEST] * 2
    assert [top["logprob"] for entry in entries for top in entry["top_logprobs"]] == [LOWEST] * 4
    _, *others = answer["prompt_logprobs"]
    assert {entry["logprob"] for row in others for entry in row.values()} == {LOWEST}
