"""Engines on a real Ray cluster, with the fake model: who starts, who ends, and what is told."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
import ray

from cluster.engine_calls import connect
from cluster.engine_client import EngineClient
from cluster.engine_spec import with_hash_seed
from cluster.errors import EngineUnavailableError
from cluster.supervisor import existing_supervisors, supervisor_of
from configs import CacheConfig, Config
from scheduler.crash import VERDICT
from scheduler.messages import EngineState, FinishReason, SamplingParams
from tests.support.engines import (
    READY_SECONDS,
    client_of,
    fake_spec,
    generate,
    generate_and_check,
    request_of,
    status_of,
)
from tests.support.fake_rank import POISON
from tests.support.faults import is_alive, kill, pids_of

SLOW = fake_spec("model.model=fake-20ms")


def test_a_hash_seed_that_is_not_configured_is_drawn() -> None:
    """The core alone would take 0, with which everybody can compute contents that collide."""
    seeds = {with_hash_seed(Config()).cache.hash_seed for _ in range(3)}
    assert len(seeds) == 3
    assert None not in seeds
    given = Config(cache=CacheConfig(hash_seed=0))
    assert with_hash_seed(given).cache.hash_seed == 0


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
                async with asyncio.timeout(4):
                    while "finishing its requests" not in replacing.info().reason:
                        await asyncio.sleep(0.02)
                with pytest.raises(EngineUnavailableError, match="new configuration"):
                    await client.submit([request_of(client, "late", [1], sampling)])
                await existing_supervisors()[app].undrain.remote()  # too late for that
                os.kill((await process_ids(app))["scheduler"], signal.SIGKILL)
                await asyncio.gather(*going)  # and none of them was cut
                info = await replacing.wait_ready(READY_SECONDS)
                assert info.is_ready
                assert (info.epoch, info.num_blocks) == (first_epoch + 2, 99)
                assert (
                    await generate(replacing, request_of(replacing, "new", [1], sampling))
                ).finish
                # The old replica cannot turn the wheel back.
                async with asyncio.timeout(20):
                    while client.info().reason != (
                        "another configuration has been deployed in the place of this one"
                    ):
                        await asyncio.sleep(0.1)
                assert replacing.info().epoch == first_epoch + 2
            finally:
                await replacing.close()

    asyncio.run(run())


@pytest.mark.parametrize("victim", ["worker", "scheduler"])
def test_a_death_is_a_preemption(app: str, victim: str) -> None:
    async def run() -> None:
        async with client_of(app, SLOW) as client:
            sampling = SamplingParams(max_tokens=200, seed=3)
            going = [
                asyncio.create_task(generate_and_check(client, f"r{i}", [i], sampling))
                for i in range(8)
            ]
            pids = await process_ids(app)
            await running(client, 8)
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


async def errors_of_culprits(client: EngineClient, num_culprits: int = 1) -> set[str]:
    """What ended requests that the fake model takes amiss; four others beside them got through."""
    sampling = SamplingParams(max_tokens=400, seed=3)
    bad = [
        generate(client, request_of(client, f"bad{i}", [POISON, i], sampling))
        for i in range(num_culprits)
    ]
    others = [generate_and_check(client, f"r{i}", [i], sampling) for i in range(4)]
    answers = await asyncio.gather(*bad, *others)
    culprits = answers[:num_culprits]
    assert {culprit.finish for culprit in culprits} == {FinishReason.ERROR}
    return {str(culprit.error) for culprit in culprits}


def test_requests_that_kill_the_workers_fail_and_no_others(app: str) -> None:
    """Each takes two deaths beside others, and two alone; the first two they may share."""
    spec = fake_spec("model.model=fake-5ms-poison")

    async def run() -> None:
        async with client_of(app, spec) as client:
            (error,) = await errors_of_culprits(client, 2)
            assert "died again and again" in error
            assert 6 <= (await status_of(app)).num_recoveries <= 8
            await generate_and_check(client, "after", [1], SamplingParams(3, seed=1))

    asyncio.run(run())


def test_a_process_that_stops_on_its_way_into_a_group_is_replaced(app: str) -> None:
    spec = fake_spec("model.model=fake-5ms-stop", "server.step_deadline_seconds=3")

    async def run() -> None:
        async with client_of(app, spec) as client:
            scheduler_pid = (await process_ids(app))["scheduler"]
            sampling = SamplingParams(max_tokens=400, seed=3)
            going = asyncio.create_task(generate_and_check(client, "r", [1], sampling))
            await running(client, 1)
            os.kill(scheduler_pid, signal.SIGKILL)
            answer = await going
            assert answer.usage is not None
            assert answer.usage.interruptions is not None
            (recovery,) = (await status_of(app)).recoveries
            assert (recovery.epoch, recovery.replaced) == (2, ("worker 0",))

    asyncio.run(run())


def test_a_request_that_the_scheduler_fails_over_fails_and_no_other(app: str) -> None:
    spec = fake_spec("model.model=fake-5ms-overflow")

    async def run() -> None:
        async with client_of(app, spec) as client:
            pids = await process_ids(app)
            assert await errors_of_culprits(client) == {VERDICT}
            status = await status_of(app)
            assert status.num_recoveries == 2
            assert {recovery.replaced for recovery in status.recoveries} == {("scheduler",)}
            assert "failed with OverflowError" in status.recoveries[-1].reason
            after = await process_ids(app)
            assert after["worker"] == pids["worker"]
            assert after["scheduler"] != pids["scheduler"]

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
                    for pid in pids_of("ray::WorkerProcess"):
                        kill(pid)
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


@pytest.mark.full
def test_an_engine_with_a_rank_that_cannot_be_loaded_again_is_given_up(
    app: str, tmp_path: Path
) -> None:
    """Also where the others live, and remember steps of better days."""
    model = tmp_path / "fake-5ms-once"
    model.mkdir()
    spec = fake_spec(f"model.model={model}", "parallel.tensor_parallel_size=2")

    async def run() -> None:
        async with client_of(app, spec) as client:
            request = request_of(client, "r", [1], SamplingParams(900, seed=3))
            going = asyncio.create_task(generate(client, request))
            await running(client, 1)
            status = await status_of(app)
            kill(status.places[1].process_id)
            answer = await asyncio.wait_for(going, 60)
            assert "given up after 5 deaths" in str(answer.error)
            assert client.info().state is EngineState.FAILED

    asyncio.run(run())


async def running(client: EngineClient, num_requests: int) -> None:
    """Returns when so many are in the middle of their answers."""
    async with asyncio.timeout(10):
        while client.info().running_requests < num_requests:
            await asyncio.sleep(0.01)


async def process_ids(app: str) -> dict[str, int]:
    status = await status_of(app)
    assert status.scheduler_place is not None
    return {"worker": status.places[0].process_id, "scheduler": status.scheduler_place.process_id}


def test_an_engine_without_replicas_ends(app: str) -> None:
    async def run() -> None:
        supervisor_of(app, lease_seconds=3.0)
        async with client_of(app, fake_spec()) as client:
            pids = await process_ids(app)
            await asyncio.sleep(4)
            assert client.info().is_ready, "a replica that looks keeps the lease"
        async with asyncio.timeout(15):
            while app in existing_supervisors() or any(is_alive(pid) for pid in pids.values()):
                await asyncio.sleep(0.1)

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
            async with asyncio.timeout(90):
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
    groups = ray.util.placement_group_table().values()
    assert {group["state"] for group in groups} <= {"REMOVED"}
