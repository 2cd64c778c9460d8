"""Another number of workers under requests that run: no answer is lost, and no text changes."""

import asyncio
from collections.abc import Iterator

import psutil
import pytest
import ray

from cluster.engine_client import EngineClient
from cluster.engine_spec import EngineSpec
from cluster.errors import ResizeError
from cluster.shape import Shape
from cluster.supervisor import existing_supervisors
from cluster.supervisor_view import AppStatus
from scheduler.messages import EngineState, SamplingParams
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
from tests.support.faults import kill

NUM_STREAMS = 16
SLOW = fake_spec("model.model=fake-20ms")


@pytest.fixture
def app(ray_cluster: None, request: pytest.FixtureRequest) -> Iterator[str]:
    """A name for an engine of the test's own."""
    name = request.node.name
    yield name
    asyncio.run(stop(name))


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


def new_pids(old: AppStatus) -> list[int]:
    """Of workers that have come up since."""
    before = {place.process_id for place in old.places}
    return [
        process.pid
        for process in psutil.Process().children(recursive=True)
        if process.name().startswith("ray::WorkerProc") and process.pid not in before
    ]


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
