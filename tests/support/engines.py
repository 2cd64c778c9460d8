"""Engines on a real Ray cluster, and requests to them."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import ray

from cluster.engine_calls import connect
from cluster.engine_client import EngineClient
from cluster.engine_spec import EngineSpec
from cluster.supervisor import existing_supervisors
from cluster.supervisor_view import AppStatus
from configs import load
from scheduler.messages import (
    Accepted,
    Admission,
    FinishReason,
    SamplingParams,
    SubmitRequest,
    Usage,
    pack_token_ids,
)
from scheduler.status import Counters
from tests.support.fake_model import MAX_POSITIONS, run_solo

FAKE_LOADER = "tests.support.fake_rank:load_fake_rank"
READY_SECONDS = 180.0


def fake_spec(*overrides: str) -> EngineSpec:
    """An engine whose model is `tests.support.fake_model`."""
    config = load(overrides=("model.model=fake", *overrides), environ={}).config
    return EngineSpec.of(config, loader=FAKE_LOADER)


@contextlib.asynccontextmanager
async def client_of(app: str, spec: EngineSpec) -> AsyncIterator[EngineClient]:
    """A client as an ingress replica has it, once the engine is ready."""
    client = connect(app, spec)
    try:
        info = await client.wait_ready(READY_SECONDS)
        assert info.is_ready, info
        yield client
    finally:
        await client.close()


async def status_of(app: str) -> AppStatus:
    status = await existing_supervisors()[app].status.remote()
    assert isinstance(status, AppStatus)
    return status


async def stop(app: str) -> None:
    """End the application's engine; nothing happens if there is none."""
    supervisor = existing_supervisors().get(app)
    if supervisor is not None:
        with contextlib.suppress(ray.exceptions.RayActorError):
            await supervisor.stop.remote("the test is over")
        while app in existing_supervisors():
            await asyncio.sleep(0.05)


@dataclass(slots=True)
class Answer:
    """What one stream brought."""

    admission: Admission
    token_ids: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    error: str | None = None
    usage: Usage | None = None


def request_of(
    client: EngineClient,
    request_id: str,
    prompt: Sequence[int],
    sampling: SamplingParams,
    *,
    priority: int = 0,
) -> SubmitRequest:
    return SubmitRequest(
        request_id=request_id,
        client_id=client.client_id,
        prompt_token_ids=pack_token_ids(prompt),
        sampling=sampling,
        arrival_seconds=time.time(),
        priority=priority,
    )


async def generate(client: EngineClient, request: SubmitRequest) -> Answer:
    """Submit and read to the end."""
    answer = Answer(await client.submit([request]))
    if isinstance(answer.admission, Accepted):
        async for delta in client.stream(request.request_id):
            answer.token_ids += delta.token_ids
            answer.usage = delta.usage or answer.usage
            answer.finish, answer.error = delta.finish, delta.error
    return answer


async def generate_and_check(
    client: EngineClient, request_id: str, prompt: list[int], sampling: SamplingParams
) -> Answer:
    """Submit to an engine of `fake_spec`, read to the end, and compare with a run alone."""
    answer = await generate(client, request_of(client, request_id, prompt, sampling))
    solo = run_solo(tuple(prompt), sampling, MAX_POSITIONS)
    assert tuple(answer.token_ids) == solo.token_ids
    assert answer.finish is solo.finish
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(solo.token_ids)
    return answer


def counted_between(before: Counters, after: Counters) -> dict[str, Any]:
    """What has been counted from one idle moment to the next, under the names in `Counters`."""
    counts: dict[str, Any] = {}
    for name, value in asdict(after).items():
        earlier = getattr(before, name)
        if isinstance(value, dict):
            counts[name] = {key: value[key] - earlier.get(key, 0) for key in value}
        else:
            counts[name] = value - earlier
    return counts


async def counters_of(app: str) -> Counters:
    status = await status_of(app)
    assert status.scheduler is not None, status
    assert status.scheduler.counters is not None, status
    return status.scheduler.counters


async def wait_idle(app: str) -> Counters:
    """The counters once no request is alive and no step in flight."""
    while True:
        counters = await counters_of(app)
        if not counters.open_requests and not counters.steps_in_flight:
            return counters
        await asyncio.sleep(0.05)
