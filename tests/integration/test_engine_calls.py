"""What a replica believes between the death of a scheduler and its successor. Without a cluster."""

import asyncio
from typing import Any

import pytest
import ray

from cluster.engine_calls import RayEngineCalls
from cluster.errors import EngineLostError
from cluster.supervisor_view import EngineView
from scheduler.messages import EngineInfo, EngineState, PollAnswer, encode
from tests.support.engines import fake_spec

SPEC = fake_spec()
ANSWER = PollAnswer(7, (), EngineInfo(EngineState.READY, max_model_len=64))


class Scheduler:
    """Stands for the handle of one."""

    def __init__(self, *, is_alive: bool) -> None:
        self.is_alive = is_alive
        self.poll = self

    def remote(self, *_arguments: object) -> asyncio.Future[bytes]:
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        if self.is_alive:
            future.set_result(encode(ANSWER))
        else:
            future.set_exception(ray.exceptions.RayActorError())
        return future


def view(version: int, scheduler: Any, scheduler_id: str) -> EngineView:
    """As a supervisor shows a ready engine: it does not say how large things are."""
    info = EngineInfo(EngineState.READY)
    return EngineView(version, SPEC.fingerprint, info, scheduler, scheduler_id)


@pytest.mark.parametrize("successor_is_alive", [True, False])
def test_a_successor_that_was_shown_before_the_death_was_noticed(successor_is_alive: bool) -> None:
    async def run() -> None:
        calls = RayEngineCalls("app", SPEC)
        calls._take(view(1, Scheduler(is_alive=False), "first"))
        calls._take(view(2, Scheduler(is_alive=successor_is_alive), "second"))
        with pytest.raises(EngineLostError):
            await calls.poll("me", 0)
        if successor_is_alive:
            assert await calls.poll("me", 0) == ANSWER
            return
        with pytest.raises(EngineLostError):
            await calls.poll("me", 0)
        # Nobody is left: it recovers, whatever the supervisor still believes.
        assert (await calls.poll("me", 0)).info.state is EngineState.RECOVERING

    asyncio.run(run())
