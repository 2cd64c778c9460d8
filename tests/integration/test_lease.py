"""The line between a replica and its supervisor: what is said once must arrive, or be said again.

The other side is a stand-in, or the supervisor itself outside of Ray.
"""

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import ray

import cluster.engine_calls
import cluster.supervisor
from cluster.engine import Engine
from cluster.engine_calls import RayEngineCalls
from cluster.scheduler_handle import SchedulerHandle
from cluster.shape import Shape, ShapeMemory
from cluster.supervisor import NAMESPACE, Supervisor, existing_supervisors
from cluster.supervisor_view import EngineView, Place, ReplicaActor
from scheduler.crash import CRASHES_OF_A_CULPRIT
from scheduler.errors import CoreCrashedError
from scheduler.messages import EngineInfo, EngineState
from tests.support.engines import fake_spec
from tests.support.hosted_engine import eventually, runs

SPEC = fake_spec()
REPLICA = ReplicaActor("replica", Place("node", "127.0.0.1", 1))


class Method:
    """One of an actor's."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.remote = function


class DeafSupervisor:
    """Cannot be reached when it is called for the first time."""

    def __init__(self, why: Exception) -> None:
        self.calls: list[str] = []
        self._why = why
        self.attach, self.look = Method(self._attach), Method(self._look)

    async def _attach(self, *_: object, **__: object) -> EngineView:
        self.calls.append("attach")
        if len(self.calls) == 1:
            raise self._why
        return EngineView(1, SPEC.fingerprint, EngineInfo(EngineState.STARTING), None, "")

    async def _look(self, *_: object) -> EngineView:
        self.calls.append("look")
        return await asyncio.Future()


@pytest.mark.parametrize(
    "why",
    [
        ray.exceptions.ActorUnavailableError("for a moment", b"\0" * 16),
        ray.exceptions.ActorDiedError(),
        ray.exceptions.ActorUnschedulableError("its machine has died"),
    ],
)
def test_a_replica_attaches_until_it_has_worked(
    why: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = DeafSupervisor(why)
    monkeypatch.setattr(cluster.engine_calls, "supervisor_of", lambda app: supervisor)
    monkeypatch.setattr(cluster.engine_calls, "_this_actor", lambda: REPLICA)

    async def run() -> None:
        calls = RayEngineCalls("app", SPEC)
        calls.start("ingress-1")
        await eventually(lambda: "look" in supervisor.calls)
        await calls.close()

    asyncio.run(run())
    assert supervisor.calls == ["attach", "attach", "look"]


class CrashedScheduler:
    """Its core has failed over the request "bad"."""

    def __init__(self) -> None:
        self.place = Method(lambda: asyncio.Future())
        self.wait_lost = Method(self._wait_lost)

    async def _wait_lost(self, epoch: int) -> None:
        crash = CoreCrashedError("the scheduler's core failed", ("bad",))
        raise ray.exceptions.RayTaskError("wait_lost", "", crash).as_instanceof_cause()


@runs
async def test_a_crash_counts_also_where_the_process_has_ended_before_it_is_asked() -> None:
    handle = SchedulerHandle()
    for number in range(CRASHES_OF_A_CULPRIT):
        handle.actor, handle.id = CrashedScheduler(), str(number)
        assert not handle._crashes.culprits
        assert "core failed" in await handle.wait_lost(1)
    assert handle._crashes.culprits == {"bad"}


def test_a_supervisor_that_is_gone_when_it_is_looked_up(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = {"name": cluster.supervisor._NAME_PREFIX + "gone", "namespace": NAMESPACE}
    monkeypatch.setattr(ray.util, "list_named_actors", lambda **_: [gone])
    assert existing_supervisors() == {}


def test_what_an_engine_before_has_accepted_is_waited_for_before_the_next_one_is_there() -> None:
    async def run() -> int | None:
        engine = Engine(
            SPEC,
            next_epoch=lambda: 0,
            replicas=list,
            report=lambda: None,
            is_awaited=lambda: True,
        )
        draining = asyncio.create_task(engine.drain("it is drained", 60))
        await asyncio.sleep(0.3)
        assert not draining.done()
        engine._set_info(EngineState.FAILED, "there is no room")
        return await asyncio.wait_for(draining, 10)

    assert asyncio.run(run()) is None


class StubEngine:
    """Is ready at once."""

    def __init__(self, spec: object, **_: object) -> None:
        self.info = EngineInfo(EngineState.READY)
        self.shape = Shape(1, 1)
        self.scheduler, self.scheduler_id = None, ""

    def start(self) -> None:
        pass


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A supervisor has stubs for what it uses, and little time."""

    async def nobody_died(supervisor: Supervisor) -> None:
        pass

    monkeypatch.setattr(cluster.supervisor, "Engine", StubEngine)
    monkeypatch.setattr(cluster.supervisor, "set_up_logging", lambda *_: None)
    monkeypatch.setattr(cluster.supervisor, "_TICK_SECONDS", 0.02)
    monkeypatch.setattr(cluster.supervisor, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(ShapeMemory, "recall", lambda memory, spec: None)
    monkeypatch.setattr(Supervisor, "_end_dead_replicas", nobody_died)
    return monkeypatch


def test_a_start_that_fails_is_tried_again(stubs: pytest.MonkeyPatch) -> None:
    attempts = itertools.count(1)

    def recall(memory: ShapeMemory, spec: object) -> None:
        if next(attempts) == 1:
            raise RuntimeError("the control store did not answer")

    stubs.setattr(ShapeMemory, "recall", recall)

    async def run() -> EngineInfo:
        supervisor = Supervisor("app")
        view = await supervisor.attach("ingress-1", SPEC, REPLICA)
        async with asyncio.timeout(10):
            while not view.info.is_ready:
                view = await supervisor.look("ingress-1", view.version)
        return view.info

    assert asyncio.run(run()).is_ready
    assert next(attempts) == 3


@pytest.mark.usefixtures("stubs")
def test_a_replica_that_stood_still_is_still_known() -> None:
    """It says who it is only once."""

    async def run() -> None:
        supervisor = Supervisor("app", lease_seconds=0.5)
        await supervisor.attach("ingress-1", SPEC, REPLICA)
        await supervisor.attach("other", SPEC)
        for _ in range(20):  # the other one keeps the lease
            await supervisor.look("other", -1)
            await asyncio.sleep(0.05)
        assert "ingress-1" not in supervisor._seen_seconds
        await supervisor.look("ingress-1", -1)
        assert supervisor._replica_actors == {"ingress-1": REPLICA}

    asyncio.run(run())
