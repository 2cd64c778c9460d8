"""Rounds of requests that are ended in every way there is: what an engine holds afterwards."""

import asyncio
import random
from pathlib import Path

import psutil
import pytest

from cluster.engine_client import EngineClient
from cluster.engine_spec import EngineSpec
from cluster.supervisor import existing_supervisors
from configs import load
from scheduler.messages import EndReason, EndRequest, SamplingParams, SubmitRequest
from tests.support.engines import client_of, fake_spec, request_of, status_of, wait_idle
from tests.support.models import make_stories_stand_in

NUM_BLOCKS = 40
REQUESTS_PER_ROUND = 200
MAX_GROWTH = 0.03
SETTINGS = (f"cache.num_blocks={NUM_BLOCKS}", "scheduler.policy=priority")


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["fake", "real"])
def test_ten_rounds_leave_nothing(app: str, kind: str, tmp_path: Path) -> None:
    spec = fake_spec(*SETTINGS)
    if kind == "real":
        settings = (f"model.model={make_stories_stand_in(tmp_path)}", *SETTINGS)
        spec = EngineSpec.of(load(overrides=settings, environ={}).config)
    rng = random.Random(11)

    async def run() -> None:
        sizes = []
        # One replica that stays, so that the engine does; the others come and go.
        async with client_of(app, spec) as staying:
            for round_number in range(1, 11):
                await one_round(app, spec, rng, staying, round_number)
                sizes.append(await resident_bytes(app))
        for name, size in sizes[-1].items():
            growth = size / sizes[2][name] - 1
            assert growth < MAX_GROWTH, f"{name} grew by {growth:.1%}: {sizes}"

    asyncio.run(run())


async def one_round(
    app: str, spec: EngineSpec, rng: random.Random, staying: EngineClient, round_number: int
) -> None:
    async with client_of(app, spec) as leaving:
        fates = []
        for i in range(REQUESTS_PER_ROUND):
            # Requests of the client that leaves are never ended by anybody: it just goes.
            client = leaving if i % 10 == 0 else staying
            max_tokens = 3000 if client is leaving else rng.randint(1, 60)
            request = request_of(
                client,
                f"round-{round_number}-{i}",
                [rng.randrange(32) for _ in range(rng.randint(1, 100))],
                SamplingParams(max_tokens, seed=i, ignore_eos=client is not leaving),
                priority=rng.randrange(3),
            )
            fate = none_at_all if client is leaving else rng.choice(FATES)
            fates.append(asyncio.create_task(fate(client, request, rng.random())))
            if rng.random() < 0.1:
                await asyncio.sleep(0.01)
        await asyncio.gather(*fates)
    counters = await wait_idle(app)
    assert staying.num_streams == 0
    assert counters.held_blocks == 0
    assert counters.evictable_blocks + counters.scratch_blocks == NUM_BLOCKS - 1
    assert sum(counters.finished.values()) == round_number * REQUESTS_PER_ROUND
    await staying.reset_prefix_cache()


async def to_the_end(client: EngineClient, request: SubmitRequest, when: float) -> None:
    await client.submit([request])
    async for _ in client.stream(request.request_id):
        pass


async def stopped(client: EngineClient, request: SubmitRequest, when: float) -> None:
    """As by a stop text: after some tokens, and read to the end."""
    await client.submit([request])
    stop_at = int(1 + when * 20)
    num_tokens = 0
    async for delta in client.stream(request.request_id):
        num_tokens += len(delta.token_ids)
        if num_tokens - len(delta.token_ids) < stop_at <= num_tokens and delta.finish is None:
            await client.end(EndRequest(request.request_id, EndReason.STOP, stop_at))


async def aborted(client: EngineClient, request: SubmitRequest, when: float) -> None:
    """As by a client that goes away at some moment, perhaps before it was accepted."""
    reading = asyncio.create_task(to_the_end(client, request, when))
    await asyncio.wait({reading}, timeout=0.3 * when * when)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await client.end(EndRequest(request.request_id, EndReason.ABORT))


async def abandoned(client: EngineClient, request: SubmitRequest, when: float) -> None:
    """Accepted, never read, and ended."""
    await client.submit([request])
    await asyncio.sleep(0.1 * when)
    await client.end(EndRequest(request.request_id, EndReason.SLOW_CLIENT))


async def none_at_all(client: EngineClient, request: SubmitRequest, when: float) -> None:
    await client.submit([request])


FATES = (to_the_end, stopped, aborted, abandoned)


async def resident_bytes(app: str) -> dict[str, int]:
    """Of every process of the engine, once it has been idle for a moment."""
    await asyncio.sleep(2.5)
    status = await status_of(app)
    assert status.scheduler_place is not None
    pids = {f"worker {rank}": place.process_id for rank, place in enumerate(status.places)}
    pids["scheduler"] = status.scheduler_place.process_id
    pids["supervisor"] = await existing_supervisors()[app].process_id.remote()
    return {name: psutil.Process(pid).memory_info().rss for name, pid in pids.items()}
