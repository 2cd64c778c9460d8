"""Requests to an engine on a real Ray cluster, with the fake model: what they yield, and how they
end."""

import asyncio
import random
from collections.abc import Iterator

import pytest
import ray

from cluster.engine_calls import connect
from cluster.engine_client import EngineClient
from cluster.errors import EngineBusyError
from scheduler.messages import (
    Accepted,
    BadRequest,
    EndReason,
    EndRequest,
    FinishReason,
    NeverFits,
    SamplingParams,
)
from tests.support.cancelled_caller import Caller, Listener
from tests.support.engines import (
    client_of,
    counted_between,
    counters_of,
    fake_spec,
    generate,
    generate_and_check,
    request_of,
    stop,
    wait_idle,
)
from tests.support.fake_model import MAX_POSITIONS, VOCABULARY

NUM_BLOCKS = 24
APP = "shared"
SPEC = fake_spec(
    "model.model=fake-2ms", f"cache.num_blocks={NUM_BLOCKS}", "scheduler.policy=priority"
)


@pytest.fixture(scope="module")
def shared_app(ray_cluster: None) -> Iterator[str]:
    """An engine that stays for the tests of this module; each of them has its own client."""
    yield APP
    asyncio.run(stop(APP))


def prompt_of(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(num_tokens)]


def test_text_is_that_of_a_run_alone_however_often_it_is_interrupted(shared_app: str) -> None:
    rng = random.Random(4)
    common = prompt_of(rng, 40)

    async def run() -> None:
        async with client_of(APP, SPEC) as client:
            jobs = [
                generate_and_check(
                    client,
                    f"job-{i}",
                    common + prompt_of(rng, rng.randint(1, 20)),
                    SamplingParams(max_tokens=rng.randint(1, 80), seed=i, stop_token_ids=(7,)),
                )
                for i in range(64)
            ]
            answers = await asyncio.gather(*jobs)
            assert any(answer.usage.interruptions for answer in answers if answer.usage)
            counters = await wait_idle(APP)
            assert client.num_streams == 0
        assert counters.held_blocks == 0
        assert counters.preemptions["blocks"] > 0

    asyncio.run(run())


def test_ends_and_refusals_from_outside(shared_app: str) -> None:
    async def run() -> None:
        async with client_of(APP, SPEC) as client:
            long = SamplingParams(max_tokens=300, seed=1)
            request = request_of(client, "stopped", [1, 2, 3], long)
            assert isinstance(await client.submit([request]), Accepted)
            received: list[int] = []
            async for delta in client.stream("stopped"):
                if not received:
                    await client.end(EndRequest("stopped", EndReason.STOP, 1))
                received += delta.token_ids
            assert delta.finish is FinishReason.STOP
            assert delta.usage is not None
            assert delta.usage.completion_tokens == 1

            # An end may overtake its request.
            await client.end(EndRequest("early", EndReason.ABORT))
            early = await generate(client, request_of(client, "early", [1], long))
            assert early.finish is FinishReason.ABORT

            too_long = request_of(client, "a", [1] * ((NUM_BLOCKS - 1) * 16 + 1), long)
            fitting = request_of(client, "b", [1], long)
            assert isinstance(await client.submit([fitting, too_long]), NeverFits)
            beyond = request_of(client, "c", [1] * MAX_POSITIONS, long)
            assert isinstance(await client.submit([beyond]), BadRequest)
            assert client.num_streams == 0
            await wait_idle(APP)

    asyncio.run(run())


def test_the_prefix_cache_is_reset_when_nobody_holds_it(shared_app: str) -> None:
    async def run() -> None:
        async with client_of(APP, SPEC) as client:
            sampling = SamplingParams(max_tokens=200, seed=9)
            request = request_of(client, "holder", [5] * 33, sampling)
            assert isinstance(await client.submit([request]), Accepted)
            stream = client.stream("holder")
            await anext(stream)
            with pytest.raises(EngineBusyError, match=r"\d+ blocks"):
                await client.reset_prefix_cache()
            async for _ in stream:
                pass
            await wait_idle(APP)
            await client.reset_prefix_cache()
            assert (await counters_of(APP)).scratch_blocks == NUM_BLOCKS - 1

    asyncio.run(run())


def test_requests_of_a_replica_that_is_gone_end(
    shared_app: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        client = connect(APP, SPEC)
        await client.wait_ready(30)
        sampling = SamplingParams(max_tokens=100_000, seed=1)
        # Prompts that fill most of the pool, so that they take long.
        for i in range(4):
            request = request_of(client, f"orphan-{i}", [i] * 300, sampling, priority=9)
            assert isinstance(await client.submit([request]), Accepted)
        await client.close()

    async def wait() -> None:
        async with asyncio.timeout(30):
            await wait_idle(APP)

    asyncio.run(run())
    asyncio.run(wait())


def test_a_call_to_the_scheduler_outlives_the_task_it_came_from(ray_cluster: None) -> None:
    """Serve cancels the task of a client that goes away, and Ray what the task has called."""
    listener = ray.remote(num_cpus=0)(Listener).remote()
    caller = ray.remote(num_cpus=0)(Caller).remote(listener)
    text = listener.late.remote("the client is gone")
    calling = caller.call.remote([text])
    ray.get(caller.has_called.remote())
    ray.cancel(calling)
    with pytest.raises(ray.exceptions.TaskCancelledError):
        ray.get(calling)
    ray.get(listener.answer_now.remote())
    assert ray.get(caller.results.remote()) == ["TaskCancelledError", "NoneType"]
    assert ray.get(listener.told.remote()) == ["the client is gone"]


def test_two_engines_share_a_cluster_and_nothing_else(app: str, shared_app: str) -> None:
    async def counted(client: EngineClient, name: str) -> object:
        """Ids and counters of a fixed sequence of requests, one after the other."""
        await client.reset_prefix_cache()
        before = await wait_idle(app)
        answers = []
        for i in range(12):
            sampling = SamplingParams(max_tokens=30, seed=i)
            request = request_of(client, f"{name}-{i}", [7] * (20 + i), sampling)
            answers.append(await generate(client, request))
        after = await wait_idle(app)
        return [answer.token_ids for answer in answers], counted_between(before, after)

    async def load(client: EngineClient, stopping: asyncio.Event) -> None:
        rng = random.Random(1)
        number = 0
        while not stopping.is_set():
            number += 1
            prompt = prompt_of(rng, 40)
            await asyncio.gather(
                *(
                    generate(
                        client,
                        request_of(client, f"a{number}-{i}", prompt, SamplingParams(40, seed=i)),
                    )
                    for i in range(16)
                )
            )

    async def run() -> None:
        async with client_of(APP, SPEC) as a, client_of(app, fake_spec()) as b:
            alone = await counted(b, "alone")
            stopping = asyncio.Event()
            loading = asyncio.create_task(load(a, stopping))
            beside = await counted(b, "beside")
            stopping.set()
            await loading
            assert beside == alone

    asyncio.run(run())
