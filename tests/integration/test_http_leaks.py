"""Rounds of HTTP requests that end in every way there is: what the HTTP side holds afterwards."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.asking import ask, with_client
from tests.support.serving import App, deployed

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
NUM_BLOCKS = 40
LEAVING = 0.5
"""Clients with a number below are read to their end."""
REQUESTS_PER_ROUND = 200
NUM_ROUNDS = 10
MAX_GROWTH = 0.03
SETTLED_SECONDS = 4.0
"""Then a replica has given back what it does not need."""


@pytest.fixture
def app(port: int, model: Path) -> Iterator[App]:
    settings = (
        f"model.model={model}",
        f"cache.num_blocks={NUM_BLOCKS}",
        "scheduler.policy=priority",
    )
    with deployed("leaks", port, *settings) as app:
        yield app


@pytest.mark.full
@pytest.mark.timeout(900)
def test_ten_rounds_leave_nothing(app: App) -> None:
    rng = random.Random(12)
    sizes: list[dict[str, int]] = []
    num_read = 0
    for round_number in range(1, NUM_ROUNDS + 1):
        fates = [(draw(rng), rng.random()) for _ in range(REQUESTS_PER_ROUND)]

        async def run(client: httpx.AsyncClient, fates: list[Any] = fates) -> None:
            await asyncio.gather(*(one(client, job, when) for job, when in fates))
            await asyncio.sleep(SETTLED_SECONDS)

        with_client(app.url, run)
        app.wait_idle()
        counters = app.counters()
        assert counters.evictable_blocks + counters.scratch_blocks == NUM_BLOCKS - 1
        # A client may leave before the server has come to its request.
        num_read += sum(when < LEAVING for _, when in fates)
        num_finished = sum(counters.finished.values())
        assert num_read <= num_finished <= round_number * REQUESTS_PER_ROUND
        assert counters.finished["abort"] > 0
        sizes.append(resident_bytes())
    for name, size in sizes[-1].items():
        growth = size / sizes[2][name] - 1
        assert growth < MAX_GROWTH, f"{name} grew by {growth:.1%}: {sizes}"


def draw(rng: random.Random) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = {
        "max_tokens": rng.randint(1, 60),
        "ignore_eos": True,
        "stream": rng.random() < 0.5,
        "priority": rng.randrange(3),
        "stop": rng.choice([None, "e", ["nothing of the kind"]]),
    }
    text = "".join(rng.choice("abcdefgh ") for _ in range(rng.randint(1, 100))) + "."
    if rng.random() < 0.5:
        return CHAT, {**body, "messages": [{"role": "user", "content": text}]}
    return COMPLETIONS, {**body, "prompt": text}


async def one(client: httpx.AsyncClient, job: tuple[str, dict[str, Any]], when: float) -> None:
    """Half of them are read to their end; the clients of the others leave at some moment."""
    asking = asyncio.create_task(ask(client, *job))
    if when < LEAVING:
        await asking
        return
    await asyncio.wait({asking}, timeout=1 + 2 * (when - LEAVING))
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


def resident_bytes() -> dict[str, int]:
    """Of the processes that carry HTTP, by name."""
    names = ("ray::ProxyActor", "ray::ServeReplica:leaks")
    found = {}
    for process in psutil.Process().children(recursive=True):
        title = " ".join(process.cmdline())
        for name in names:
            if title.startswith(name):
                found[name] = process.memory_info().rss
    assert set(found) == set(names), found
    return found
