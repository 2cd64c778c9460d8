"""The workers of an engine: a process for each rank, and the group that they form in each epoch.

    start_missing ─► load ─► join ─► run ─► leave ─┐
          ▲────────────────────────────────────────┘

Who leaves in good order keeps its weights and joins the next epoch. Who died, failed or does not
answer is forgotten, and another process takes its rank, at the same place.
"""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from cluster.link_choice import LinkOffers
from cluster.placement import Placement
from cluster.processes import WorkerProcess, place_here
from cluster.ray_errors import awaited, first_done, sentence
from cluster.shape import Shape
from cluster.supervisor_view import Place
from configs import Device, ParallelConfig, ResolvedConfig
from configs.ranks import world_size
from scheduler.errors import LinkError, ProtocolError
from scheduler.messages import JoinGroup, WorkerHello, decode, encode
from worker.errors import GroupBrokenError, MirrorDriftError

logger = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"
_ANSWER_SECONDS = 5.0
"""Within which a process answers that is not stopped."""
_PING_SECONDS = 2.0
_LEAST_HANG_SECONDS = 10.0
"""A process that imports torch on a busy machine can be silent for a while."""
_LEAVE_SECONDS = 8.0
"""Within which a rank leaves its group: longer, because some can only after others were ended."""

# Calls of these methods are for the device's one thread; all others answer at any time.
_CONCURRENCY_GROUPS = {"device": 1}

# What is wrong with an epoch is over with it. After any other error of a rank nobody knows what
# its process is still good for.
_ERRORS_OF_AN_EPOCH = (GroupBrokenError, MirrorDriftError, ProtocolError, LinkError)


@dataclass(slots=True)
class _Worker:
    handle: Any
    calls: list[asyncio.Future[Any]] = field(default_factory=list)
    """Of the epoch, on the device's thread: `join` and `run`, and a `load` that failed. `run` ends
    with the epoch or with the process, so waiting for it is the death notice."""
    place: Place | None = None
    """Once it has told."""


class WorkerGroup:
    """`close` ends it, whatever it was doing."""

    def __init__(
        self, placement: Placement, loader: str, config: ResolvedConfig, device: Device
    ) -> None:
        """`loader`: see `EngineSpec.loader`."""
        self.placement = placement
        self._loader = loader
        self._config = config
        self._device = device
        self._workers: dict[int, _Worker] = {}

    @property
    def shape(self) -> Shape:
        return Shape.of(self._config.parallel)

    @property
    def num_ranks(self) -> int:
        return world_size(self._config.parallel)

    @property
    def handles(self) -> list[Any]:
        """In the order of ranks, as far as there are processes."""
        return [self._workers[rank].handle for rank in sorted(self._workers)]

    async def places(self) -> list[Place]:
        workers = [self._workers[rank] for rank in sorted(self._workers)]
        places = await asyncio.gather(*(worker.handle.place.remote() for worker in workers))
        for worker, place in zip(workers, places, strict=True):
            worker.place = place
        return list(places)

    async def check_shape(self, parallel: ParallelConfig) -> None:
        """Raises RayTaskError if the model cannot be spread so; does nothing where no rank has
        loaded it and could tell."""
        for handle in self.handles:
            with contextlib.suppress(ray.exceptions.RayActorError, TimeoutError):
                async with asyncio.timeout(_ANSWER_SECONDS):
                    if await handle.check_shape.remote(parallel):
                        return

    # -- the way into an epoch ------------------------------------------------------------

    def start_missing(self) -> list[int]:
        """Start a process for each rank that has none; these ranks."""
        missing = [rank for rank in range(self.num_ranks) if rank not in self._workers]
        actor = ray.remote(concurrency_groups=_CONCURRENCY_GROUPS)(WorkerProcess)
        for rank in missing:
            options = self.placement.options_of(rank)
            handle = actor.options(max_restarts=0, enable_task_events=False, **options).remote(
                self._loader, self._config, self._device, rank
            )
            self._workers[rank] = _Worker(handle)
        return missing

    async def load(self, report: Callable[[str], None]) -> None:
        """Bring the model into the memory of those that do not have it; `report` is told of it."""
        loads = [_on_device(handle, "load") for handle in self.handles]
        loading = f"{self.num_ranks} workers are loading the model"
        report(loading)
        try:
            for num_ready, load in enumerate(asyncio.as_completed(loads), 1):
                await load
                report(f"{loading}, {num_ready} of them are ready")
        finally:
            for rank, load in zip(sorted(self._workers), loads, strict=True):
                if load.done() and load.exception() is not None:
                    self._workers[rank].calls.append(load)  # which is why it is not kept
            await _settled(loads)

    async def join(
        self, epoch: int, places: Sequence[Place], *, is_local: bool
    ) -> list[WorkerHello]:
        """Let all ranks find each other.

        `is_local`: all of them, and the scheduler, are on one machine.
        """
        parallel = self._config.parallel
        store_host = _LOOPBACK if is_local else places[0].host
        ports = range(parallel.first_port, parallel.last_port + 1)
        store_port = await self._workers[0].handle.listen.remote(store_host, ports)
        joins = []
        for rank, place in enumerate(places):
            message = JoinGroup(
                epoch=epoch,
                rank=rank,
                host=_LOOPBACK if is_local else place.host,
                store_host=store_host,
                store_port=store_port,
                store_prefix=f"epoch-{epoch}",
            )
            joins.append(self._call(rank, "join", encode(message)))
        # Whoever gives this up has not ended the calls: `leave` waits for what becomes of them.
        hellos = await asyncio.gather(*map(asyncio.shield, joins))
        return [decode(data, WorkerHello) for data in hellos]

    def run(self, link: LinkOffers, address: str) -> None:
        """Let all ranks obey the plans that come over `link`."""
        for rank in range(self.num_ranks):
            self._call(rank, "run", link.of_worker(rank, address))

    async def first_end(self) -> str:
        """Wait until a rank no longer obeys; which one, and why."""
        last_calls = {rank: worker.calls[-1] for rank, worker in self._workers.items()}
        await asyncio.wait(last_calls.values(), return_when=asyncio.FIRST_COMPLETED)
        ended = [rank for rank, call in last_calls.items() if call.done()]
        return f"worker {ended[0]} is lost: {sentence(last_calls[ended[0]].exception())}"

    async def first_hang(self) -> str:
        """Wait until a process that has answered once does so no longer; which one, and for how
        long. Whether it is at work is told by the deadline of its steps."""
        hangs = [asyncio.ensure_future(self._hang(rank)) for rank in self._workers]
        return str(next(iter(await first_done(*hangs))).result())

    async def _hang(self, rank: int) -> str:
        handle = self._workers[rank].handle
        seconds = max(_LEAST_HANG_SECONDS, self._config.server.step_deadline_seconds)
        try:
            await handle.place.remote()
            while True:
                await asyncio.sleep(_PING_SECONDS)
                async with asyncio.timeout(seconds):
                    await handle.place.remote()
        except TimeoutError:
            return f"worker {rank} is lost: it has not answered for {seconds:g} s"
        except ray.exceptions.RayError:
            return await asyncio.Future()  # its other calls fail, and say so

    # -- and out of it --------------------------------------------------------------------

    async def leave(self) -> int:
        """Let all ranks leave their group, and end those that do not.

        How many steps of the epoch a rank has done, as far as one is left that can say so.
        """
        steps = await asyncio.gather(*(self._leave(rank) for rank in list(self._workers)))
        return max(steps, default=0)

    async def _leave(self, rank: int) -> int:
        worker, num_steps, why = self._workers[rank], 0, ""
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                num_steps = await worker.handle.leave.remote()
            why = await _reason_to_end(worker)
        except TimeoutError:
            why = f"it has not answered for {_ANSWER_SECONDS:g} s"
            _kill_at_once(worker.place)
        except ray.exceptions.RayError as error:
            why = sentence(error)
        if why:
            logger.warning("worker %d is replaced: %s", rank, why)
            del self._workers[rank]
            ray.kill(worker.handle)  # no error if it is dead already
            await _settled(worker.calls)
        worker.calls.clear()
        return num_steps

    async def close(self) -> None:
        """End all processes and give their place back. Safe to call again."""
        workers, self._workers = list(self._workers.values()), {}
        calls = [call for worker in workers for call in worker.calls]
        for worker in workers:
            worker.handle.leave.remote()
        if calls:
            await asyncio.wait(calls, timeout=_ANSWER_SECONDS)
        for worker in workers:
            ray.kill(worker.handle)
        self.placement.remove()
        await _settled(calls)

    def _call(self, rank: int, method: str, *arguments: Any) -> asyncio.Future[Any]:
        worker = self._workers[rank]
        call = _on_device(worker.handle, method, *arguments)
        worker.calls.append(call)
        return call


async def _reason_to_end(worker: _Worker) -> str:
    """Why a process that was told to leave must not join again; empty if it may."""
    if worker.calls:
        _, pending = await asyncio.wait(worker.calls, timeout=_LEAVE_SECONDS)
        if pending:
            return f"it has not left its group within {_LEAVE_SECONDS:g} s"
    for call in worker.calls:
        error = call.exception()
        cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
        if cause is not None and not isinstance(cause, _ERRORS_OF_AN_EPOCH):
            return sentence(error)
    return ""


def _kill_at_once(place: Place | None) -> None:
    """End a process of this machine that is stopped. Ray would give it five seconds, in which its
    peers wait for it."""
    if place is not None and place.node_id == place_here().node_id:
        with contextlib.suppress(ProcessLookupError):
            os.kill(place.process_id, signal.SIGKILL)


def _on_device(handle: Any, method: str, *arguments: Any) -> asyncio.Future[Any]:
    """Call a method on the device's own thread."""
    reference = getattr(handle, method).options(concurrency_group="device").remote(*arguments)
    return asyncio.ensure_future(awaited(reference))


async def _settled(calls: Sequence[asyncio.Future[Any]]) -> None:
    """Drop the calls: what becomes of them is of no interest."""
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
