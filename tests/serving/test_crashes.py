"""A request that the scheduler itself cannot stand: it fails alone, and all others go on."""

import asyncio
import pickle
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from cluster.engine_client import EngineClient
from scheduler.core import SchedulerCore
from scheduler.crash import CRASHES_OF_A_CULPRIT, VERDICT, CrashLog
from scheduler.errors import CoreCrashedError
from scheduler.messages import Accepted, EndReason, EndRequest, EngineState, FinishReason
from scheduler.planner import StepPlanner
from scheduler.request import Request
from tests.support.hosted_engine import EPOCH, EXPECTED, eventually, read, slow_engine

BAD, GOOD = "bad", "good"

PLACES: dict[str, tuple[type, str]] = {
    "submit": (Request, "of"),
    "plan": (StepPlanner, "_admit"),
    "result": (SchedulerCore, "_apply_output"),
    "end": (SchedulerCore, "_end"),
}


def make_fail(patch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    """Let the function raise whenever it is given the bad request."""
    original: Callable[..., Any] = getattr(owner, name)

    def failing(*arguments: Any, **named: Any) -> Any:
        for value in arguments:
            if getattr(value, "request_id", None) == BAD:
                return _fail(value)
        return original(*arguments, **named)

    patch.setattr(owner, name, staticmethod(failing) if name == "of" else failing)


def _fail(request: Any) -> None:
    raise ZeroDivisionError("the test wants this to fail")


@pytest.mark.parametrize("place", PLACES)
def test_the_culprit_fails_and_nobody_else(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make_fail(monkeypatch, *PLACES[place])
    asyncio.run(crash_until_it_is_over(place))


async def crash_until_it_is_over(place: str) -> None:
    crashes = CrashLog()
    async with AsyncExitStack() as schedulers:
        it = await schedulers.enter_async_context(slow_engine(may_crash=True))
        calls, client = it.calls, it.client
        submissions = [
            asyncio.create_task(client.submit([it.request(name)])) for name in (GOOD, BAD)
        ]
        ending = asyncio.create_task(end_soon(client)) if place == "end" else None
        good = asyncio.create_task(read_when_accepted(client, GOOD))
        bad = asyncio.create_task(last_delta(client, BAD))
        for number in range(CRASHES_OF_A_CULPRIT):
            assert not crashes.culprits
            with pytest.raises(CoreCrashedError, match="ZeroDivisionError") as crash:
                await it.actor.wait_lost(EPOCH)
            await eventually(lambda: client.info().state is EngineState.RECOVERING)
            with pytest.raises(CoreCrashedError):
                await it.actor.ping()
            assert crash.value.request_ids == (BAD,)
            crashes.note(f"scheduler-{number}", crash.value)
            crashes.note(f"scheduler-{number}", crash.value)
            it = await schedulers.enter_async_context(
                slow_engine(culprits=crashes.culprits, may_crash=True)
            )
            calls.actor = it.actor
        assert crashes.culprits == {BAD}
        delta = await bad
        assert (delta.finish, delta.error) == (FinishReason.ERROR, VERDICT)
        assert await good == (EXPECTED, FinishReason.LENGTH)
        for submitting in submissions:
            assert isinstance(await submitting, Accepted)
        if ending is not None:
            await ending
        assert client.num_streams == 0
        assert await it.num_open() == 0


async def end_soon(client: EngineClient) -> None:
    await eventually(lambda: client.num_streams == 2)
    await client.end(EndRequest(BAD, EndReason.STOP, 1))


async def read_when_accepted(client: EngineClient, name: str) -> Any:
    await eventually(lambda: client.num_streams == 2)
    return await read(client, name)


async def last_delta(client: EngineClient, name: str) -> Any:
    await eventually(lambda: client.num_streams == 2)
    return [delta async for delta in client.stream(name)][-1]


def test_one_crash_proves_nothing_and_a_crash_about_nobody_accuses_nobody() -> None:
    crashes = CrashLog()
    crashes.note("first", CoreCrashedError("it failed", ("a",)))
    crashes.note("second", CoreCrashedError("it failed", ()))
    crashes.note("third", CoreCrashedError("it failed", ("b",)))
    assert not crashes.culprits
    crashes.note("fourth", CoreCrashedError("it failed", ("a", "c")))
    assert crashes.culprits == {"a"}


def test_a_crash_survives_pickling() -> None:
    crash = pickle.loads(pickle.dumps(CoreCrashedError("it failed", ("a",))))
    assert (str(crash), crash.request_ids) == ("it failed", ("a",))
