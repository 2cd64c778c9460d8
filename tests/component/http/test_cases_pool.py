"""CASES 1 to 7 over HTTP: what a pool that is too small may cost, and what it may not."""

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from scheduler.messages import Open, StepPlan
from tests.component.http.conftest import TightServer
from tests.support.asking import ask_all, with_client
from tests.support.http_server import HttpServer

COMPLETIONS = "/v1/completions"
NO_END = {"2": -100}


def prompt_of(num_tokens: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 512) for _ in range(num_tokens)]


def body_of(num_prompt_tokens: int, max_tokens: int, prompt_seed: int = 0, **fields: Any) -> Any:
    return {
        "prompt": prompt_of(num_prompt_tokens, prompt_seed),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        **fields,
    }


def one_by_one(server: HttpServer, bodies: list[dict[str, Any]]) -> list[tuple[object, ...]]:
    return [ask_all(server.url, [(COMPLETIONS, body)])[0].content for body in bodies]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


class Reading:
    """A stream that is read in the background; `chunks` grows."""

    def __init__(self, client: httpx.AsyncClient, body: dict[str, Any]) -> None:
        self.chunks: list[dict[str, Any]] = []
        options = {"include_usage": True}
        body = {**body, "stream": True, "stream_options": options}
        self.task = asyncio.create_task(self._read(client, body))

    @property
    def text(self) -> str:
        return "".join(choice["text"] for chunk in self.chunks for choice in chunk["choices"])

    @property
    def preemption(self) -> dict[str, Any]:
        preemption: dict[str, Any] = self.chunks[-1]["usage"].get("preemption", {})
        return preemption

    async def begun(self) -> None:
        await until(lambda: bool(self.chunks))

    async def _read(self, client: httpx.AsyncClient, body: dict[str, Any]) -> None:
        async with client.stream("POST", COMPLETIONS, json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    self.chunks.append(json.loads(line.removeprefix("data: ")))


def test_case_1_a_resumed_request_gets_on(roomy: HttpServer, squeezed: TightServer) -> None:
    pair = {**body_of(0, 60), "prompt": [prompt_of(100, 1), prompt_of(100, 2)]}
    expected = one_by_one(roomy, [pair])
    with squeezed(15, max_num_batched_tokens=32) as server:
        [answer] = ask_all(server.url, [(COMPLETIONS, pair)])
        server.wait_idle()
    assert [answer.content] == expected
    assert answer.preemption
    assert answer.preemption["count"] <= 2
    assert answer.preemption["recomputed_tokens"] <= 160


def test_case_3_a_preempted_request_goes_before_one_that_has_not_started(
    squeezed: TightServer,
) -> None:
    """Two prompts of 7 blocks meet in a pool of 15: at their 113th token the second one has to
    go. It leaves no room for a third one of 8 blocks, and nobody needs its own 7 meanwhile."""
    pair = {**body_of(0, 28), "prompt": [prompt_of(100, 1), prompt_of(100, 2)]}
    opened: list[str] = []

    def note(plan: StepPlan) -> None:
        opened.extend(u.seq.request_id for u in plan.updates if isinstance(u, Open))

    async def run(client: httpx.AsyncClient) -> None:
        both = Reading(client, pair)
        await both.begun()
        third = Reading(client, body_of(120, 5, 3))
        await both.task
        preemption = both.preemption
        assert (preemption["count"], preemption["recomputed_tokens"]) == (1, 0)
        assert preemption["recovered_tokens"] == 112
        await third.task

    with squeezed(15, policy="priority", step_seconds=0.01) as server:
        server.engine.link.on_plan = note
        with_client(server.url, run)
        server.wait_idle()
    first, second, again, last = opened
    assert again == second
    assert last not in (first, second)


def test_case_4_a_victim_that_was_planned_already(roomy: HttpServer, squeezed: TightServer) -> None:
    """The urgent one runs behind the other, and soon needs the 15th block of 14."""
    patient = body_of(97, 40, 1)
    urgent = body_of(110, 20, 2)
    expected = [ask_all(roomy.url, [(COMPLETIONS, body)])[0].texts[0] for body in (patient, urgent)]

    async def run(client: httpx.AsyncClient) -> None:
        first = Reading(client, {**patient, "priority": 5})
        await first.begun()
        second = Reading(client, urgent)
        await asyncio.gather(first.task, second.task)
        assert [first.text, second.text] == expected
        assert first.preemption["causes"] == {"blocks": 1}
        assert not second.preemption

    with squeezed(14, policy="priority", step_seconds=0.05) as server:
        with_client(server.url, run)
        server.wait_idle()


def test_case_5_what_outgrows_the_pool_is_cut_or_refused(squeezed: TightServer) -> None:
    with squeezed(8) as server, httpx.Client(base_url=server.url, timeout=30) as client:
        body = body_of(60, 1000, logit_bias=NO_END, ignore_eos=False)
        answer = client.post(COMPLETIONS, json=body).json()
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["total_tokens"] == 8 * 16 + 1  # the last token needs no slot
        refused = client.post(COMPLETIONS, json={**body, "ignore_eos": True})
        assert refused.status_code == 400
        assert "the whole cache holds 128" in refused.json()["error"]["message"]
        longer = client.post(COMPLETIONS, json=body_of(129, 1))
        assert longer.status_code == 400
        assert "129 tokens, and the whole KV cache holds 128" in longer.json()["error"]["message"]
        assert client.post(COMPLETIONS, json=body_of(60, 5)).status_code == 200
        server.wait_idle()


@pytest.mark.parametrize(
    "num_steps_later", [0, *(pytest.param(n, marks=pytest.mark.full) for n in (3, 6, 9))]
)
def test_case_6_a_request_that_ends_while_it_waits_for_its_context(
    roomy: HttpServer, squeezed: TightServer, num_steps_later: int
) -> None:
    stays, leaves = body_of(100, 60, 1), body_of(100, 60, 2)
    [(texts, *_)] = one_by_one(roomy, [stays])

    async def run(client: httpx.AsyncClient) -> None:
        first = Reading(client, stays)
        await first.begun()
        second = Reading(client, leaves)
        await second.begun()
        await until(lambda: server.engine.client.info().waiting_requests == 1)
        await asyncio.sleep(num_steps_later * 0.02)
        second.task.cancel()
        await asyncio.gather(second.task, return_exceptions=True)
        await first.task
        assert {0: first.text} == texts
        assert not first.preemption

    with squeezed(15, step_seconds=0.02) as server:
        with_client(server.url, run)
        server.wait_idle()
        status = server.run(server.engine.actor.status)
    assert status.counters is not None
    assert status.counters.finished == {"length": 1, "abort": 1}


def test_case_7_what_was_said_before_a_preemption_holds_after_it(
    roomy: HttpServer, squeezed: TightServer
) -> None:
    """Prompts in common stay cached while what was generated is written over."""
    seeded = {"temperature": 0.8, "top_p": 0.95}
    bodies = [
        body_of(70, 50, 1, **fields, stream=stream)
        for stream in (False, True)
        for fields in (
            {},
            {**seeded, "seed": 1},
            {**seeded, "seed": 2, "n": 2},
            {"n": 2, "repetition_penalty": 1.2, "logprobs": 2},
            {**seeded, "seed": 3, "presence_penalty": 0.5, "logprobs": 0, "echo": True},
        )
    ]
    expected = [ask_all(roomy.url, [(COMPLETIONS, body)])[0] for body in bodies]
    with squeezed(20) as server:
        answers = ask_all(server.url, [(COMPLETIONS, body) for body in bodies])
        server.wait_idle()
    assert [answer.content for answer in answers] == [alone.content for alone in expected]
    for answer, alone in zip(answers, expected, strict=True):
        assert answer.token_logprobs == pytest.approx(alone.token_logprobs, abs=1e-4)
        assert len(answer.token_logprobs) == len(alone.token_logprobs)
    preemptions = [answer.preemption for answer in answers if answer.preemption]
    assert sum(preemption["count"] for preemption in preemptions) >= 5
    assert sum(preemption["recomputed_tokens"] for preemption in preemptions) > 0
    assert sum(preemption["recovered_tokens"] for preemption in preemptions) > 0
