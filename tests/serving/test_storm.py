"""CASES 8 over HTTP: many clients that come, go and hurry, in a pool that is far too small."""

import asyncio
import contextlib
import random
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from configs import Config, SchedulerConfig
from scheduler import invariants
from scheduler.core import SchedulerCore
from scheduler.errors import BrokenInvariantError
from scheduler.messages import StepPlan
from tests.support.asking import CHAT, COMPLETIONS, ask, body_of, with_client
from tests.support.http_server import HttpServer, http_server

PANGRAM = "The quick brown fox jumps over the lazy dog alpha beta gamma one two three"
WORDS = PANGRAM.split(" ")
NUM_CLIENTS = 12
STEP_SECONDS = 0.005


@dataclass(slots=True)
class Watch:
    """Checks the core after each plan, on the thread that owns it."""

    core: SchedulerCore
    broken: list[str] = field(default_factory=list)

    def __call__(self, plan: StepPlan) -> None:
        try:
            invariants.check(self.core, plan)
        except BrokenInvariantError as error:
            self.broken.append(str(error))


async def act(client: httpx.AsyncClient, rng: random.Random) -> None:
    """One request: read to its end, left while it runs or waits, or cut by a stop text."""
    text = " ".join(rng.choices(WORDS, k=rng.randint(1, 12)))
    path = rng.choice((COMPLETIONS, CHAT))
    fields: dict[str, Any] = {
        "priority": rng.randint(0, 3),
        "stream": rng.random() < 0.5,
        "n": rng.choice((1, 1, 2)),
        "cache_salt": rng.choice(("", "a")),
    }
    if rng.random() < 0.3:
        fields |= {"ignore_eos": True, "max_tokens": 90, "min_tokens": rng.randint(0, 90)}
    if rng.random() < 0.2:
        fields |= {"logprobs": True} if path == CHAT else {"logprobs": 1, "echo": True}
    body = body_of(path, text, **{"max_tokens": 60, **fields})
    if rng.random() < 0.3:
        await leave(client, path, body, rng)
        return
    stop = rng.choice(WORDS) if rng.random() < 0.3 else ""
    answer = await ask(client, path, {**body, "stop": stop or None})
    if not (stop or "ignore_eos" in fields):
        expected = text + text if "echo" in fields else text
        assert all(expected.startswith(said) for said in answer.texts.values())
        assert "stop" not in answer.finishes.values() or set(answer.texts.values()) == {expected}


async def leave(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], rng: random.Random
) -> None:
    """Go away after some time, or for certain in the middle of an answer."""
    if rng.random() < 0.5:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(rng.random() * 0.1):
                await ask(client, path, body)
        return
    body = {**body, "stream": True, "ignore_eos": True, "max_tokens": 90}
    async with client.stream("POST", path, json=body) as answer:
        await anext(answer.aiter_lines())


def storm(server: HttpServer, num_steps: int, seed: int) -> None:
    link = server.engine.link

    async def client_of(client: httpx.AsyncClient, number: int) -> None:
        rng = random.Random(seed * 1000 + number)
        while link.num_steps < num_steps:
            await act(client, rng)

    async def run(client: httpx.AsyncClient) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(NUM_CLIENTS):
                group.create_task(client_of(client, number))

    with_client(server.url, run)


@pytest.mark.parametrize(
    "num_steps", [1000, pytest.param(20_000, marks=[pytest.mark.full, pytest.mark.timeout(600)])]
)
def test_case_8_a_storm_leaves_nothing_behind(num_steps: int) -> None:
    config = Config(
        scheduler=SchedulerConfig(policy="priority", max_num_seqs=6, max_num_batched_tokens=32)
    )
    # Slow enough for clients to be heard while they are answered, also on a quick machine.
    with http_server(config, num_blocks=13, step_seconds=STEP_SECONDS) as server:
        loop = server.engine.actor._loop
        assert loop is not None
        watch = server.engine.link.on_plan = Watch(loop._core)
        storm(server, num_steps, seed=num_steps)
        server.wait_idle()
        counters = server.run(server.engine.actor.status).counters
    assert watch.broken == []
    assert counters is not None
    assert counters.preemptions["blocks"] > num_steps / 100
    assert counters.finished["abort"] > 0
    assert counters.held_blocks + counters.evictable_blocks + counters.scratch_blocks == 12
