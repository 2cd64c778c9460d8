"""The one actor of an application that starts and ends its engine.

It is made by whoever asks first, and lives on a lease: ingress replicas look at it every few
seconds, and when none has looked for a minute it ends the engine and itself. So every way of
ending the application, also a killed machine, ends the engine too.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import time
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.engine import Engine
from cluster.engine_spec import EngineSpec
from cluster.errors import ResizeError
from cluster.logs import set_up_logging
from cluster.processes import place_here
from cluster.shape import Shape, ShapeMemory
from cluster.supervisor_view import AppStatus, EngineView, ReplicaActor
from scheduler.messages import EngineInfo, EngineState

logger = logging.getLogger(__name__)

NAMESPACE = "palimpsest"
_NAME_PREFIX = "supervisor:"

LOOK_SECONDS = 5.0
"""How long a look waits for something to change."""
LEASE_SECONDS = 60.0
_TICK_SECONDS = 1.0


class Supervisor:
    def __init__(self, app: str, *, lease_seconds: float = LEASE_SECONDS) -> None:
        set_up_logging()
        self._app = app
        self._lease_seconds = lease_seconds
        self._epochs = itertools.count()
        self._spec: EngineSpec | None = None
        self._shapes = ShapeMemory(app)
        self._engine: Engine | None = None
        self._replacing: asyncio.Task[None] | None = None
        self._version = 0
        self._changed = asyncio.Event()
        self._seen_seconds: dict[str, float] = {}
        self._last_seen_seconds = time.monotonic()
        self._fingerprints: dict[str, str] = {}
        """Of what each client wants."""
        self._replica_actors: dict[str, ReplicaActor] = {}
        """Of the clients that are actors."""
        self._is_successor = False
        """Replicas knew an engine before this actor had any, which may have accepted requests."""
        self._num_looking = 0
        self._stopping = asyncio.Lock()
        self._lease: asyncio.Task[None] | None = None

    async def attach(
        self,
        client_id: str,
        spec: EngineSpec,
        replica: ReplicaActor | None = None,
        *,
        has_been_served: bool = False,
    ) -> EngineView:
        """See to it that an engine for `spec` runs, or will, and take part in the lease.

        `replica`: the client is this actor, whose death is its own. `has_been_served`: by an
        engine under another supervisor, and it may have requests that go on here.

        One for the same configuration is used as it is, unless it has failed. One for another
        is drained and replaced if `spec` was deployed later; otherwise nothing happens, and the
        view has another fingerprint.
        """
        self._see(client_id)
        self._is_successor |= has_been_served
        self._fingerprints[client_id] = spec.fingerprint
        if replica is not None:
            self._replica_actors[client_id] = replica
        if self._lease is None:
            self._lease = asyncio.create_task(self._watch_lease(), name="lease")
        current = self._spec
        if current is not None and current.fingerprint != spec.fingerprint:
            if spec.deployed_seconds > current.deployed_seconds:
                self._replace(spec, f"a new configuration is deployed as {self._app}")
        elif current is None or self._info.state is EngineState.FAILED:
            self._replace(spec, "")
        elif spec.deployed_seconds > current.deployed_seconds:
            self._spec = spec  # the same again
            if self._engine is not None and not self._is_replacing:
                self._shapes.keep(spec, self._engine.shape)
        return self._view(client_id)

    async def look(self, client_id: str, version: int) -> EngineView:
        """The engine, as soon as it differs from the view `version`, at most a few seconds later.

        Keeps the lease.
        """
        self._see(client_id)
        if version == self._version:
            self._num_looking += 1
            try:
                async with asyncio.timeout(LOOK_SECONDS):
                    while version == self._version:
                        self._changed.clear()
                        await self._changed.wait()
            except TimeoutError:
                pass
            finally:
                self._num_looking -= 1
                self._see(client_id)
        return self._view(client_id)

    async def resize(self, tp_size: int | None, pp_size: int | None) -> Shape:
        """Spread the engine over so many workers; None leaves a size as it is.

        Returns the shape that it has when its group stands, which is what it has from now on, also
        under the next supervisor. Raises ResizeError, see `Engine.resize`.
        """
        engine = self._engine
        if engine is None or self._is_replacing:
            raise ResizeError(f"there is no engine to resize: {self._info.reason}")
        now = engine.shape
        shape = Shape(tp_size or now.tensor_parallel_size, pp_size or now.pipeline_parallel_size)
        await engine.resize(shape)
        if self._spec is not None and not self._is_replacing:
            await asyncio.to_thread(self._shapes.keep, self._spec, shape)
        return shape

    async def process_id(self) -> int:
        return os.getpid()

    async def status(self) -> AppStatus:
        engine, scheduler = self._engine, None
        if engine is not None:
            with contextlib.suppress(ray.exceptions.RayError):
                scheduler = await engine.status()
        return AppStatus(
            app=self._app,
            model=self._spec.config.model.model if self._spec is not None else "no model",
            info=self._info if scheduler is None else scheduler.info,
            shape=engine.shape if engine is not None else None,
            num_replicas=len(self._seen_seconds),
            scheduler_place=engine.scheduler_place if engine is not None else None,
            places=engine.places if engine is not None else (),
            supervisor_place=place_here(),
            replica_places=tuple(actor.place for actor in self._replica_actors.values()),
            scheduler=scheduler,
            num_restarts=engine.faults.num_restarts if engine is not None else 0,
            num_recoveries=engine.num_recoveries if engine is not None else 0,
            recoveries=tuple(engine.recoveries) if engine is not None else (),
        )

    async def drain(self, reason: str, timeout_seconds: float | None = None) -> int | None:
        """Take no new requests, for `reason`, and let the others go on for `timeout_seconds`
        (None: `server.drain_seconds`); see `Engine.drain`.

        It holds until `undrain`, or until another configuration is deployed.
        """
        if self._replacing is not None:
            await asyncio.shield(self._replacing)
        if self._engine is None:
            return 0
        if timeout_seconds is None:
            timeout_seconds = self._engine.spec.config.server.drain_seconds
        logger.info("%s is drained for at most %g s: %s", self._app, timeout_seconds, reason)
        num_ended = await self._engine.drain(reason, timeout_seconds)
        if num_ended is not None:
            logger.info("%s is drained; %d requests had to be ended", self._app, num_ended)
        return num_ended

    async def undrain(self) -> None:
        """Take requests again. While another configuration takes the place of this one, it is too
        late for that."""
        if self._engine is not None and not self._is_replacing:
            await self._engine.undrain()

    async def stop(self, reason: str) -> None:
        """End the engine and this actor; the call itself fails with its death."""
        async with self._stopping:
            logger.info("the engine of %s ends: %s", self._app, reason)
            if self._replacing is not None:
                self._replacing.cancel()
            try:
                if self._engine is not None:
                    await self._engine.close(reason)
                await asyncio.to_thread(self._shapes.forget)
            except Exception:
                logger.exception("the engine of %s did not end in peace", self._app)
            # Not `exit_actor`, which waits for the calls that are underway.
            ray.kill(ray.get_runtime_context().current_actor)
            await asyncio.Event().wait()

    # -- engines -------------------------------------------------------------------------

    @property
    def _is_replacing(self) -> bool:
        return self._replacing is not None and not self._replacing.done()

    @property
    def _info(self) -> EngineInfo:
        if self._is_replacing:
            return EngineInfo(
                EngineState.STARTING, "the engine before this one is finishing its requests"
            )
        if self._engine is None:
            return EngineInfo(EngineState.STARTING, "no engine has been asked for")
        return self._engine.info

    def _view(self, client_id: str) -> EngineView:
        old = self._engine if self._is_replacing else None
        wanted = self._fingerprints.get(client_id)
        is_newest = self._spec is not None and self._spec.fingerprint == wanted
        if old is not None and old.spec.fingerprint == wanted and not is_newest:
            # What it has there goes on, should it have to be brought to another scheduler.
            return EngineView(
                self._version, wanted, old.info, old.scheduler, scheduler_id=old.scheduler_id
            )
        return EngineView(
            version=self._version,
            fingerprint=self._spec.fingerprint if self._spec is not None else "",
            info=self._info,
            scheduler=None if self._is_replacing or not self._engine else self._engine.scheduler,
            scheduler_id="" if self._engine is None else self._engine.scheduler_id,
        )

    def _replace(self, spec: EngineSpec, reason: str) -> None:
        set_up_logging(spec.config.server)
        self._spec = spec
        if self._replacing is None or self._replacing.done():
            self._replacing = asyncio.create_task(self._start_next(reason), name="replace")
        self._change()

    async def _start_next(self, reason: str) -> None:
        """Drain and end the engine there is, and start the one that was asked for last."""
        while True:
            try:
                await self._try_to_start_next(reason)
                return
            except Exception:
                # Who waits for that engine asks for it only once.
                logger.exception("the next engine could not be started; trying again")
                await asyncio.sleep(_TICK_SECONDS)

    async def _try_to_start_next(self, reason: str) -> None:
        old = self._engine
        if old is not None:
            await old.drain(reason, old.spec.config.server.drain_seconds)
            await old.close(reason)
            self._engine, self._is_successor = None, False
        while True:
            spec = self._spec
            assert spec is not None, "replace sets it"
            shape = await asyncio.to_thread(self._shapes.recall, spec)
            if spec is self._spec:
                break
        self._engine = Engine(
            spec,
            next_epoch=lambda: next(self._epochs),
            replicas=self._replicas,
            report=self._change,
            is_awaited=lambda: self._is_successor,
            shape=shape,
        )
        self._engine.start()
        # What holds changes when this task is done, so tell then.
        asyncio.get_running_loop().call_soon(self._change)

    def _change(self) -> None:
        self._version += 1
        self._changed.set()

    # -- lease ---------------------------------------------------------------------------

    def _see(self, client_id: str) -> None:
        self._seen_seconds[client_id] = self._last_seen_seconds = time.monotonic()

    def _replicas(self) -> list[str]:
        """Who has looked a moment ago."""
        since_seconds = time.monotonic() - 2 * LOOK_SECONDS
        return [client for client, seen in self._seen_seconds.items() if seen > since_seconds]

    async def _watch_lease(self) -> None:
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            now = time.monotonic()
            for client_id, seen_seconds in list(self._seen_seconds.items()):
                if now - seen_seconds > self._lease_seconds:
                    # What else is known of it goes with its actor: it may have stood still.
                    del self._seen_seconds[client_id]
            is_due = now - self._last_seen_seconds > self._lease_seconds
            if is_due and not self._num_looking:
                await self.stop(f"no ingress replica has called for {self._lease_seconds:.0f} s")
            try:
                await self._end_dead_replicas()
            except Exception:
                logger.exception("asking for dead replicas failed; trying again")

    async def _end_dead_replicas(self) -> None:
        """Their requests hold blocks, and nobody will ever read what comes of them."""
        if not self._replica_actors:
            return
        alive = await asyncio.to_thread(ray.util.list_named_actors, all_namespaces=True)
        names = {entry["name"] for entry in alive}
        for client_id, actor in list(self._replica_actors.items()):
            if actor.name not in names:
                logger.warning("the ingress replica %s is dead; its requests end", actor.name)
                self._seen_seconds.pop(client_id, None)
                self._fingerprints.pop(client_id, None)
                del self._replica_actors[client_id]
                if self._engine is not None:
                    await self._engine.forget(client_id)


def supervisor_of(app: str, *, lease_seconds: float = LEASE_SECONDS) -> Any:
    """The supervisor of an application, made now if there is none. Needs a Ray connection.

    A new one runs on the machine of whoever asks, as does the scheduler that it starts: on
    Kubernetes that is a worker pod, never the head, which has no room for them.
    """
    here = ray.get_runtime_context().get_node_id()
    return (
        ray.remote(Supervisor)
        .options(
            name=_NAME_PREFIX + app,
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            num_cpus=0,
            # Not soft, which Ray takes for none at all where no resources are asked for.
            scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
            max_restarts=0,
            max_concurrency=10_000,
            enable_task_events=False,
        )
        .remote(app, lease_seconds=lease_seconds)
    )


def existing_supervisors() -> dict[str, Any]:
    """The supervisors that there are, by application."""
    found = {}
    for entry in ray.util.list_named_actors(all_namespaces=True):
        name = entry["name"]
        if entry["namespace"] == NAMESPACE and name.startswith(_NAME_PREFIX):
            with contextlib.suppress(ValueError):  # it has gone meanwhile
                found[name.removeprefix(_NAME_PREFIX)] = ray.get_actor(name, namespace=NAMESPACE)
    return found
