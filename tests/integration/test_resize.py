"""Another number of workers under requests that run: no answer is lost, and no text changes."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import ray

from cluster.engine_calls import connect
from cluster.engine_client import EngineClient
from cluster.engine_spec import EngineSpec
from cluster.errors import ResizeError
from cluster.shape import Shape
from cluster.supervisor import existing_supervisors
from cluster.supervisor_view import AppStatus
from scheduler.messages import EngineState, SamplingParams
from tests.support import faulty_rank
from tests.support.asking import COMPLETIONS, Job
from tests.support.commands import palimpsest
from tests.support.engines import (
    Answer,
    client_of,
    fake_spec,
    generate,
    request_of,
    status_of,
    stop,
)
from tests.support.fake_model import MAX_POSITIONS, run_solo
from tests.support.faults import kill, pids_of, undisturbed
from tests.support.serving import deployed
from worker.pull import pull

NUM_STREAMS = 16
SLOW = fake_spec("model.model=fake-20ms")


async def resize(app: str, tp: int | None = None, pp: int | None = None) -> Shape:
    """Raises ResizeError, as `palimpsest scale` understands it."""
    try:
        shape = await existing_supervisors()[app].resize.remote(tp, pp)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    assert isinstance(shape, Shape)
    return shape


class Streams:
    """Requests that are under way, all of which must say what one alone says."""

    def __init__(self, client: EngineClient, name: str) -> None:
        self._sampling = SamplingParams(max_tokens=100, seed=3)
        requests = [
            request_of(client, f"{name}-{i}", [i], self._sampling) for i in range(NUM_STREAMS)
        ]
        self._tasks = [asyncio.create_task(generate(client, request)) for request in requests]

    async def end(self) -> list[Answer]:
        answers = await asyncio.gather(*self._tasks)
        for i, answer in enumerate(answers):
            solo = run_solo((i,), self._sampling, MAX_POSITIONS)
            assert answer.error is None, answer.error
            assert (tuple(answer.token_ids), answer.finish) == (solo.token_ids, solo.finish)
        return answers


def causes_of(answers: list[Answer]) -> set[str]:
    return {
        cause
        for answer in answers
        if answer.usage is not None and answer.usage.interruptions is not None
        for cause in answer.usage.interruptions.causes
    }


async def running(client: EngineClient) -> None:
    async with asyncio.timeout(20):
        while client.info().running_requests < NUM_STREAMS:
            await asyncio.sleep(0.02)


@pytest.mark.full
def test_what_the_machines_do_not_allow_is_refused(app: str) -> None:
    """The cluster of these tests has eight CPUs."""
    spec = fake_spec("parallel.cpus_per_rank=2")

    async def run() -> None:
        async with client_of(app, spec):
            epoch = (await status_of(app)).info.epoch
            with pytest.raises(ResizeError) as caught:
                await resize(app, tp=5)
            assert str(caught.value) == (
                "it needs 10 CPU, and the machines of the cluster, with 8, have room for 0 of "
                "that; add machines, or choose a smaller shape"
            )
            other = ray.remote(num_cpus=3)(Holder).remote()
            await other.ready.remote()
            with pytest.raises(ResizeError, match=r"it needs 6 CPU, and 5 are free, those that"):
                await resize(app, tp=3)
            ray.kill(other)
            assert (await status_of(app)).info.epoch == epoch, "nothing was changed"
            async with asyncio.timeout(10):
                while ray.available_resources()["CPU"] < 6:
                    await asyncio.sleep(0.05)
            assert await resize(app, tp=4) == Shape(4, 1), "in the place of the old one"

    asyncio.run(run())


class Holder:
    """Has resources."""

    def ready(self) -> None:
        pass


def new_pids(old: AppStatus) -> list[int]:
    """Of workers that have come up since."""
    before = {place.process_id for place in old.places}
    return [pid for pid in pids_of("ray::WorkerProcess") if pid not in before]


def test_what_is_decided_when_things_happen_at_once(app: str) -> None:
    async def run() -> None:
        async with client_of(app, SLOW) as client:
            streams = Streams(client, "first")
            await running(client)
            first = asyncio.create_task(resize(app, tp=3))
            while client.info().is_ready:
                await asyncio.sleep(0.01)
            with pytest.raises(ResizeError, match="a resize to TP 3 x PP 1 is under way"):
                await resize(app, tp=2)
            assert await first == Shape(3, 1)
            assert causes_of(await streams.end()) == {"resize"}
            status = await status_of(app)
            assert len(status.places) == 3
            assert status.num_restarts == 0, "nobody died"
            assert status.scheduler is not None
            assert status.scheduler.counters is not None
            assert status.scheduler.counters.preemptions == {"resize": NUM_STREAMS}

            assert await resize(app, tp=3) == Shape(3, 1)
            assert (await status_of(app)).info.epoch == status.info.epoch, "nothing to do"
            with pytest.raises(ResizeError, match="set pipeline_parallel_size to 1"):
                await resize(app, pp=2)
            assert (await status_of(app)).info.epoch == status.info.epoch, "nothing was changed"

            # What dies after it is replaced as part of the new shape.
            streams = Streams(client, "second")
            await running(client)
            kill(status.places[2].process_id)
            assert causes_of(await streams.end()) == {"worker_lost"}
            assert len((await status_of(app)).places) == 3

    asyncio.run(run())


def test_the_next_scheduler_and_the_next_supervisor_know_the_new_shape(app: str) -> None:
    async def run() -> None:
        async with client_of(app, SLOW) as client:
            assert await resize(app, tp=2) == Shape(2, 1)
            streams = Streams(client, "scheduler")
            await running(client)
            status = await status_of(app)
            assert status.scheduler_place is not None
            kill(status.scheduler_place.process_id)
            assert causes_of(await streams.end()) == {"scheduler_lost"}
            assert len((await status_of(app)).places) == 2

            streams = Streams(client, "supervisor")
            await running(client)
            old = await existing_supervisors()[app].process_id.remote()
            kill(old)
            assert causes_of(await streams.end()) == {"scheduler_lost"}
            status = await status_of(app)
            assert status.shape == Shape(2, 1)
            assert len(status.places) == 2

            # The same configuration, deployed again while it runs, is the same deployment.
            again = EngineSpec.of(SLOW.config, loader=SLOW.loader)
            async with client_of(app, again):
                assert (await status_of(app)).shape == Shape(2, 1)
        # Whoever ends an application ends what it was scaled to.
        await stop(app)
        async with client_of(app, SLOW):
            assert (await status_of(app)).shape == Shape(1, 1)

    asyncio.run(run())


def test_deaths_while_it_is_resized_restore_the_old_shape(app: str) -> None:
    """A shape that does not come up at the first attempt is not tried again."""

    async def run() -> None:
        async with client_of(app, SLOW) as client:
            streams = Streams(client, "r")
            await running(client)
            old = await status_of(app)
            resizing = asyncio.create_task(resize(app, tp=3))
            async with asyncio.timeout(30):
                while not (pids := new_pids(old)):
                    await asyncio.sleep(0.005)
            kill(pids[0])
            with pytest.raises(ResizeError, match=r"did not come up.*TP 1 x PP 1 was restored"):
                await resizing
            assert (await status_of(app)).shape == Shape(1, 1)
            assert causes_of(await streams.end()) == {"resize"}
            status = await status_of(app)
            assert status.info.state is EngineState.READY
            assert len(status.places) == 1
            assert await resize(app, tp=2) == Shape(2, 1)

    asyncio.run(run())


@pytest.mark.full
def test_a_new_configuration_that_comes_while_it_is_resized(app: str) -> None:
    """It waits for the requests, which need the group that is forming; and has its own shape."""

    async def run() -> None:
        async with client_of(app, SLOW) as client:
            streams = Streams(client, "r")
            await running(client)
            resizing = asyncio.create_task(resize(app, tp=2))
            while client.info().is_ready:
                await asyncio.sleep(0.01)
            other = fake_spec("cache.num_blocks=99")
            replacing = connect(app, other)
            try:
                while "finishing its requests" not in replacing.info().reason:
                    await asyncio.sleep(0.01)
                with pytest.raises(ResizeError, match=r"no engine to resize: .* finishing"):
                    await resize(app, tp=1)
                assert await resizing == Shape(2, 1)
                assert causes_of(await streams.end()) == {"resize"}
                assert (await replacing.wait_ready(30)).is_ready
                status = await status_of(app)
                assert (status.shape, status.info.num_blocks) == (Shape(1, 1), 99)
            finally:
                await replacing.close()

    asyncio.run(run())


# -- over HTTP, with real models -------------------------------------------------------------


def the_jobs(max_tokens: int) -> list[Job]:
    """As many as there are streams, greedy and seeded."""
    drawn: list[Job] = []
    for number in range(NUM_STREAMS):
        body: dict[str, Any] = {"max_tokens": max_tokens + number, "stream": number % 4 < 3}
        body |= {"temperature": 0} if number % 2 else {"seed": number, "top_p": 0.9}
        drawn.append((COMPLETIONS, {**body, "prompt": f"One day, {number} children"}))
    return drawn


def test_a_real_model_over_http_and_a_shape_that_cannot_come_up(port: int, model: Path) -> None:
    """The memory granted to each rank holds a request of full length in two halves alone."""
    settings = (
        f"model.model={model}",
        "model.dtype=float32",
        "model.max_model_len=512",
        "parallel.tensor_parallel_size=2",
        "cache.kv_cache_memory=480KiB",
    )
    with deployed("resized", port, *settings) as app:
        num_blocks = app.status().info.num_blocks
        load = undisturbed(app, the_jobs(12))
        with load.running():
            load.wait_busy()
            done = palimpsest("scale", "--tp", "1", "--pp", "2", "--name", app.name)
            assert done.returncode == 0, done.stderr
            assert f"{app.name} runs as TP 1 x PP 2 now, with" in done.stderr
            status = app.status()
            assert (status.shape, len(status.places)) == (Shape(1, 2), 2)
            assert status.info.num_blocks < num_blocks, "stages of 3 and 2 layers"

            done = palimpsest("scale", "--pp", "1", "--name", app.name)
            assert done.returncode == 2, done.stderr
            assert "TP 1 x PP 1 did not come up" in done.stderr
            assert "but one sequence of max_model_len 512 needs 32" in done.stderr
            assert done.stderr.endswith("TP 1 x PP 2 was restored.\n")
            assert app.status().shape == Shape(1, 2)
            load.wait_for_answers()
        assert not load.causes["worker_lost"]
        app.wait_idle()


@pytest.mark.full
@pytest.mark.timeout(600)
def test_smollm2_over_http(port: int) -> None:
    settings = (
        f"model.model={pull('smollm2-135m')}",
        "model.dtype=float32",
        "model.max_model_len=1024",
        "cache.kv_cache_memory=64MiB",
    )
    with deployed("smollm2", port, *settings) as app:
        load = undisturbed(app, the_jobs(12))
        sizes = []
        with load.running():
            for tp, pp in ((3, 1), (1, 1), (1, 2)):
                load.wait_busy()
                assert asyncio.run(resize(app.name, tp, pp)) == Shape(tp, pp)
                sizes.append(app.status().info.num_blocks)
            load.wait_busy()
        assert load.causes["resize"] >= 3
        assert not load.causes["worker_lost"]
        # A third of the heads, all of the model, half of the layers, in the same memory.
        thirds, whole, halves = sizes
        assert abs(thirds - 3 * whole) <= 3
        assert abs(halves - 2 * whole) <= 2
        app.wait_idle()


@pytest.mark.full
@pytest.mark.timeout(300)
def test_workers_that_are_not_up_in_time(port: int, model: Path) -> None:
    settings = (
        f"model.model={model}",
        "model.dtype=float32",
        "cache.num_blocks=600",
        "server.group_start_seconds=45",
    )
    with deployed("late", port, *settings, loader=faulty_rank.LOADER) as app:
        load = undisturbed(app, the_jobs(12))
        asked = faulty_rank.ask(model, 1, "stall")
        with load.running():
            load.wait_busy()
            with pytest.raises(ResizeError, match=r"not ready after 45 s.*TP 1 x PP 1 was rest"):
                asyncio.run(resize(app.name, 2))
            assert not asked.exists()
            load.wait_for_answers()
        assert asyncio.run(resize(app.name, 2)) == Shape(2, 1)
        app.wait_idle()
