"""Engines on a real Ray cluster, with the fake model: who starts, who ends, and what is told."""

import asyncio
import os
import random
import signal
from collections.abc import Iterator

import psutil
import pytest
import ray

from cluster.engine import _with_hash_seed
from cluster.engine_calls import connect
from cluster.engine_client import EngineClient
from cluster.errors import EngineBusyError, EngineUnavailableError
from cluster.supervisor import existing_supervisors, supervisor_of
from configs import CacheConfig, Config
from scheduler.messages import (
    Accepted,
    BadRequest,
    EndReason,
    EndRequest,
    EngineState,
    FinishReason,
    NeverFits,
    SamplingParams,
)
from tests.support.engines import (
    Answer,
    client_of,
    fake_spec,
    generate,
    request_of,
    status_of,
    stop,
    wait_idle,
)
from tests.support.fake_model import MAX_POSITIONS, VOCABULARY, run_solo
from tests.support.fake_rank import POISON

NUM_BLOCKS = 24
APP = "shared"
SPEC = fake_spec(f"cache.num_blocks={NUM_BLOCKS}", "scheduler.policy=priority")
SLOW = fake_spec("model.model=fake-20ms")


@pytest.fixture(scope="module")
def shared_app(ray_cluster: None) -> Iterator[str]:
    """An engine that stays for the tests of this module; each of them has its own client."""
    yield APP
    asyncio.run(stop(APP))


@pytest.fixture
def app(ray_cluster: None, request: pytest.FixtureRequest) -> Iterator[str]:
    """A name for an engine of the test's own."""
    name = request.node.name
    yield name
    asyncio.run(stop(name))


def prompt_of(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(num_tokens)]


async def generate_and_check(
    client: EngineClient, request_id: str, prompt: list[int], sampling: SamplingParams
) -> Answer:
    answer = await generate(client, request_of(client, request_id, prompt, sampling))
    solo = run_solo(tuple(prompt), sampling, MAX_POSITIONS)
    assert tuple(answer.token_ids) == solo.token_ids
    assert answer.finish is solo.finish
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(solo.token_ids)
    return answer


def test_a_hash_seed_that_is_not_configured_is_drawn() -> None:
    """The core alone would take 0, with which everybody can compute contents that collide."""
    seeds = {_with_hash_seed(Config()).cache.hash_seed for _ in range(3)}
    assert len(seeds) == 3
    assert None not in seeds
    given = Config(cache=CacheConfig(hash_seed=0))
    assert _with_hash_seed(given).cache.hash_seed == 0


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
            status = await wait_idle(APP)
            assert client.num_streams == 0
        scheduler = status.scheduler
        assert scheduler is not None
        assert scheduler.counters is not None
        assert scheduler.counters.held_blocks == 0
        assert scheduler.counters.preemptions["blocks"] > 0

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
            status = await status_of(APP)
            assert status.scheduler is not None
            assert status.scheduler.counters is not None
            assert status.scheduler.counters.scratch_blocks == NUM_BLOCKS - 1

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


def test_one_configuration_has_one_engine_and_another_one_replaces_it(app: str) -> None:
    async def run() -> None:
        async with client_of(app, SLOW) as client:
            first_epoch = client.info().epoch
            sampling = SamplingParams(max_tokens=250, seed=3)
            going = [
                asyncio.create_task(generate_and_check(client, f"r{i}", [i, 1, 2], sampling))
                for i in range(20)
            ]
            await asyncio.sleep(0.2)
            async with client_of(app, fake_spec("model.model=fake-20ms")) as again:
                assert again.info().epoch == first_epoch
                await generate_and_check(again, "other", [4, 4], SamplingParams(3, seed=3))
            other = fake_spec("cache.num_blocks=99")
            replacing = connect(app, other)
            try:
                info = await replacing.wait_ready(0.5)
                assert "finishing its requests" in info.reason
                await asyncio.sleep(0.5)
                with pytest.raises(EngineUnavailableError, match="new configuration"):
                    await client.submit([request_of(client, "late", [1], sampling)])
                await asyncio.gather(*going)  # and none of them was cut
                info = await replacing.wait_ready(30)
                assert info.is_ready
                assert (info.epoch, info.num_blocks) == (first_epoch + 1, 99)
                assert (
                    await generate(replacing, request_of(replacing, "new", [1], sampling))
                ).finish
                # The old replica cannot turn the wheel back.
                async with asyncio.timeout(20):
                    while client.info().reason != (
                        "another configuration has been deployed in the place of this one"
                    ):
                        await asyncio.sleep(0.1)
                assert replacing.info().epoch == first_epoch + 1
            finally:
                await replacing.close()

    asyncio.run(run())


@pytest.mark.parametrize("victim", ["worker", "scheduler"])
def test_a_death_is_a_preemption(app: str, victim: str) -> None:
    async def run() -> None:
        async with client_of(app, SLOW) as client:
            sampling = SamplingParams(max_tokens=60, seed=3)
            going = [
                asyncio.create_task(generate_and_check(client, f"r{i}", [i], sampling))
                for i in range(8)
            ]
            await asyncio.sleep(0.5)
            pids = await process_ids(app)
            os.kill(pids[victim], signal.SIGKILL)
            async with asyncio.timeout(5):
                while client.info().state is not EngineState.RECOVERING:
                    await asyncio.sleep(0.01)
            assert victim in client.info().reason
            answers = [await generate_and_check(client, "meanwhile", [1], sampling)]
            answers += await asyncio.gather(*going)
            for answer in answers[1:]:
                assert answer.usage is not None
                assert answer.usage.interruptions is not None
                assert answer.usage.interruptions.causes == {f"{victim}_lost": 1}
            assert answers[0].usage is not None
            assert answers[0].usage.interruptions is None
            after = await process_ids(app)
            assert after.pop(victim) != pids.pop(victim)
            assert after == pids, "whoever lives is kept"

    asyncio.run(run())


def test_a_request_that_kills_the_workers_fails_and_no_other(app: str) -> None:
    spec = fake_spec("model.model=fake-5ms-poison")

    async def run() -> None:
        async with client_of(app, spec) as client:
            sampling = SamplingParams(max_tokens=400, seed=3)
            going = [
                asyncio.create_task(generate_and_check(client, f"r{i}", [i], sampling))
                for i in range(4)
            ]
            culprit = await generate(client, request_of(client, "bad", [POISON, 1], sampling))
            assert culprit.finish is FinishReason.ERROR
            assert culprit.error is not None
            assert "died again and again" in culprit.error
            await asyncio.gather(*going)
            assert (await status_of(app)).num_recoveries == 4
            await generate_and_check(client, "after", [1], SamplingParams(3, seed=1))

    asyncio.run(run())


@pytest.mark.full
def test_an_engine_whose_workers_keep_dying_is_given_up(app: str) -> None:
    async def run() -> None:
        async with client_of(app, SLOW) as client:
            going = asyncio.create_task(
                generate(client, request_of(client, "r", [1], SamplingParams(900, seed=3)))
            )
            async with asyncio.timeout(60):
                while client.info().state is not EngineState.FAILED:
                    for process in psutil.Process().children(recursive=True):
                        if process.name().startswith("ray::WorkerProc"):
                            process.kill()
                    await asyncio.sleep(0.05)
            answer = await going
            assert answer.finish is FinishReason.ERROR
            assert answer.error is not None
            assert "given up after 5 deaths" in answer.error
            with pytest.raises(EngineUnavailableError, match="given up"):
                await client.submit([request_of(client, "late", [1], SamplingParams(1, seed=3))])
        # Who comes now gets a new engine.
        async with client_of(app, SLOW) as client:
            await generate_and_check(client, "again", [1, 2], SamplingParams(4, seed=3))

    asyncio.run(run())


async def process_ids(app: str) -> dict[str, int]:
    status = await status_of(app)
    assert status.scheduler_place is not None
    return {"worker": status.places[0].process_id, "scheduler": status.scheduler_place.process_id}


def test_an_engine_without_replicas_ends(app: str) -> None:
    async def run() -> None:
        supervisor_of(app, lease_seconds=3.0)
        async with client_of(app, SPEC) as client:
            pids = await process_ids(app)
            await asyncio.sleep(4)
            assert client.info().is_ready, "a replica that looks keeps the lease"
        async with asyncio.timeout(15):
            while app in existing_supervisors() or any(is_alive(pid) for pid in pids.values()):
                await asyncio.sleep(0.1)

    asyncio.run(run())


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


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
        counts = []
        for status in (before, after):
            assert status.scheduler is not None
            assert status.scheduler.counters is not None
            c = status.scheduler.counters
            counts.append((c.queries_tokens, c.hits_tokens, c.scheduled_prompt_tokens))
        differences = tuple(b - a for a, b in zip(*counts, strict=True))
        return [answer.token_ids for answer in answers], differences

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


def test_the_link_over_ray_calls_serves_two_ranks(app: str) -> None:
    spec = fake_spec("parallel.plan_link=ray", "parallel.tensor_parallel_size=2")

    async def run() -> None:
        async with client_of(app, spec) as client:
            sampling = SamplingParams(max_tokens=20, seed=3)
            await asyncio.gather(
                *(generate_and_check(client, f"r{i}", [i, 2], sampling) for i in range(16))
            )
            assert len((await status_of(app)).places) == 2

    asyncio.run(run())


@pytest.mark.parametrize(
    ("overrides", "state", "words"),
    [
        (
            ("parallel.device=cuda", "parallel.tensor_parallel_size=2"),
            EngineState.STARTING,
            "waiting for 2 GPU: the cluster has 0, of which 0 are free",
        ),
        (("model.model=unknown",), EngineState.FAILED, "unknown"),
        (("server.group_start_seconds=0.01",), EngineState.FAILED, "server.group_start_seconds"),
    ],
)
def test_what_keeps_an_engine_from_starting_is_told(
    app: str, overrides: tuple[str, ...], state: EngineState, words: str
) -> None:
    async def run() -> None:
        client = connect(app, fake_spec(*overrides))
        try:
            async with asyncio.timeout(30):
                while words not in client.info().reason:
                    await asyncio.sleep(0.05)
            assert client.info().state is state
            with pytest.raises(EngineUnavailableError, match=words):
                await client.submit([request_of(client, "r", [1], SamplingParams(1, seed=1))])
        finally:
            await client.close()

    asyncio.run(run())


def test_what_engines_leave(ray_cluster: None) -> None:
    """Runs last in this module: the placement groups of all engines were given back."""
    asyncio.run(stop(APP))
    groups = ray.util.placement_group_table().values()
    assert {group["state"] for group in groups} <= {"REMOVED"}
