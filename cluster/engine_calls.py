"""The engine over Ray, as an EngineClient calls it."""

import asyncio
import contextvars
import logging
from collections.abc import Sequence
from typing import Any

import ray

from cluster.engine_client import EngineClient
from cluster.engine_spec import EngineSpec
from cluster.errors import EngineBusyError, EngineLostError, EngineReplacedError
from cluster.processes import place_here
from cluster.supervisor import supervisor_of
from cluster.supervisor_view import EngineView, ReplicaActor
from scheduler.errors import CacheInUseError, CoreCrashedError
from scheduler.messages import (
    AbortRequests,
    EndRequest,
    EngineInfo,
    EngineState,
    PollAnswer,
    SubmitAnswer,
    SubmitRequest,
    SubmitRequests,
    Tally,
    TallyAnswer,
    decode,
    decode_submit_answer,
    encode,
)

logger = logging.getLogger(__name__)

_PAUSE_SECONDS = 0.2
_LOST = "the scheduler died and is being replaced"
_REPLACED = "another configuration has been deployed in the place of this one"


class RayEngineCalls:
    """Finds the engine of an application through its supervisor, and keeps the lease."""

    def __init__(self, app: str, spec: EngineSpec) -> None:
        self._app = app
        self._spec = spec
        self._client_id = ""
        self._view: EngineView | None = None
        self._scheduler: Any = None
        self._scheduler_id = ""
        self._lost_id = ""
        """Of the last scheduler that died under us; the supervisor may not know yet."""
        self._watcher: asyncio.Task[None] | None = None

    def start(self, client_id: str) -> None:
        """Take part in the lease as `client_id`, from now until `close`."""
        self._client_id = client_id
        self._watcher = asyncio.create_task(self._watch(), name="engine-lease")

    async def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)

    async def submit(self, messages: Sequence[SubmitRequest]) -> SubmitAnswer:
        data = await self._call("submit", encode(SubmitRequests(tuple(messages))))
        return decode_submit_answer(data)

    async def resume(self, client_id: str, messages: Sequence[SubmitRequest]) -> SubmitAnswer:
        data = await self._call("resume", client_id, encode(SubmitRequests(tuple(messages))))
        return decode_submit_answer(data)

    async def end(self, message: EndRequest) -> None:
        await self._call("end", encode(message))

    async def exchange_counts(self, report: Tally) -> TallyAnswer:
        return decode(await self._call("exchange_counts", encode(report)), TallyAnswer)

    async def abort(self, ids: Sequence[str]) -> int:
        num_ended: int = await self._call("abort", encode(AbortRequests(tuple(ids))))
        return num_ended

    async def reset_prefix_cache(self) -> None:
        try:
            await self._call("reset_prefix_cache")
        except CacheInUseError as error:
            # As text Ray's own error is a traceback; what was raised there is its cause.
            raise EngineBusyError(str(getattr(error, "cause", error))) from error

    async def poll(self, client_id: str, last_batch: int) -> PollAnswer:
        if self._scheduler is None:
            await asyncio.sleep(_PAUSE_SECONDS)
        if self._scheduler is None:
            self._check_not_replaced()
            return PollAnswer(last_batch, (), self._info())
        return decode(await self._call("poll", client_id, last_batch), PollAnswer)

    async def _call(self, method: str, *arguments: object) -> Any:
        """Call the scheduler. A machine out of reach for a moment is called again."""
        scheduler = self._scheduler
        if scheduler is None:
            raise EngineLostError(self._info().reason)
        while True:
            try:
                return await call_of_its_own(getattr(scheduler, method), *arguments)
            except ray.exceptions.ActorUnavailableError:
                # All calls may be repeated: ids are known, batches are kept.
                await asyncio.sleep(_PAUSE_SECONDS)
            except (ray.exceptions.RayActorError, CoreCrashedError) as error:
                if self._scheduler is scheduler:
                    self._lose()
                raise EngineLostError(_LOST) from error

    def _lose(self) -> None:
        """Our scheduler died. Its successor may have been shown to us before we noticed."""
        self._scheduler = None
        self._lost_id = self._scheduler_id
        if self._view is not None:
            self._take(self._view)

    def _check_not_replaced(self) -> None:
        if self._view is not None and self._view.fingerprint != self._spec.fingerprint:
            raise EngineReplacedError(_REPLACED)

    def _info(self) -> EngineInfo:
        """What is to be said of the engine while there is no scheduler to ask."""
        view = self._view
        if view is None:
            return EngineInfo(EngineState.STARTING, "the supervisor has not answered yet")
        if view.info.is_ready:  # the supervisor does not know yet
            return EngineInfo(EngineState.RECOVERING, _LOST)
        return view.info

    async def _watch(self) -> None:
        """Follow the supervisor's view; find a new supervisor when it is gone."""
        supervisor = None  # one that has been told of us
        while True:
            try:
                if supervisor is None:
                    found = await asyncio.to_thread(supervisor_of, self._app)
                    call = found.attach.remote(
                        self._client_id,
                        self._spec,
                        _this_actor(),
                        has_been_served=bool(self._scheduler_id),
                    )
                    self._take(await call)
                    supervisor = found
                version = self._view.version if self._view is not None else -1
                self._take(await supervisor.look.remote(self._client_id, version))
            except ray.exceptions.ActorUnavailableError:
                await asyncio.sleep(_PAUSE_SECONDS)
            except ray.exceptions.RayActorError:
                logger.warning("the supervisor of %s is gone; asking for a new one", self._app)
                supervisor = None
                await asyncio.sleep(_PAUSE_SECONDS)
            except Exception:
                # The engine ends when nobody looks.
                logger.exception("asking the supervisor failed; trying again")
                await asyncio.sleep(_PAUSE_SECONDS)

    def _take(self, view: EngineView) -> None:
        self._view = view
        # An engine that is being replaced still has answers for us, so its scheduler is kept
        # until it dies; a view without one, or with another, is no reason to leave it.
        is_ours = view.fingerprint == self._spec.fingerprint
        is_alive = view.scheduler is not None and view.scheduler_id != self._lost_id
        if is_ours and is_alive and self._scheduler is None:
            self._scheduler, self._scheduler_id = view.scheduler, view.scheduler_id


def call_of_its_own(method: Any, *arguments: object) -> Any:
    """Call a method of an actor, as a child of no task.

    Serve cancels the task of a request whose client goes away, and Ray with it all calls that the
    task has made: also the one that tells the scheduler.
    """
    # A task's children are those with its id in their context.
    return contextvars.Context().run(method.remote, *arguments)


def _this_actor() -> ReplicaActor | None:
    """None where this process is no actor, or one without a name."""
    context = ray.get_runtime_context()
    name = context.get_actor_name() if context.get_actor_id() is not None else None
    return ReplicaActor(name, place_here()) if name else None


def connect(app: str, spec: EngineSpec, *, max_recovery_seconds: float = 60.0) -> EngineClient:
    """A started client of the application's engine, which is started too if need be.

    Returns at once, within a running event loop; `EngineClient.info` says how far things are.
    """
    calls = RayEngineCalls(app, spec)
    client = EngineClient(calls, max_recovery_seconds=max_recovery_seconds, on_close=calls.close)
    calls.start(client.client_id)
    client.start()
    return client
