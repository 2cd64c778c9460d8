"""One engine: a scheduler and a group of workers, from their first process to their last.

    reserve ─► start what is missing ─► load ─► join ─► run ─► lost ─► leave ─┐
                        ▲─────────────────────────────────────────────────────┘

Whatever dies, the way is the same: the scheduler lets all that ran wait, the others leave their
group, what died is replaced at its place, and a new group forms under the next epoch.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

import ray

from cluster.death_log import MAX_DEATHS, WINDOW_SECONDS, DeathLog
from cluster.engine_spec import EngineSpec, with_hash_seed
from cluster.errors import EngineStartError, ResizeError
from cluster.fault_counts import FaultCounts
from cluster.joining import join, places_of
from cluster.placement import check_room, choose_device, reserve
from cluster.ray_errors import first_done, sentence, start_failure
from cluster.resize import ResizeDesk
from cluster.scheduler_handle import SchedulerHandle
from cluster.shape import Shape
from cluster.supervisor_view import Place, Recovery
from cluster.worker_group import WorkerGroup
from configs import ConfigError, Device, ResolvedConfig, resolve
from scheduler.messages import EngineInfo, EngineState, InterruptionCause

logger = logging.getLogger(__name__)

_NUM_RECOVERIES = 64
_DRAIN_TICK_SECONDS = 0.1


class Engine:
    def __init__(
        self,
        spec: EngineSpec,
        *,
        next_epoch: Callable[[], int],
        replicas: Callable[[], Collection[str]],
        report: Callable[[], None],
        is_awaited: Callable[[], bool],
        shape: Shape | None = None,
    ) -> None:
        """`next_epoch` hands out epochs, `replicas` tells the ids of the ingress replicas there
        are, `report` is called whenever `info` or `scheduler` has changed. `is_awaited`: replicas
        may have requests that an engine before this one has accepted. `shape`: None for the one
        in `spec`."""
        self.spec = spec
        self._config = with_hash_seed(spec.config)
        self._next_epoch = next_epoch
        self._replicas = replicas
        self._report = report
        self._is_awaited = is_awaited
        self._own_info = EngineInfo(EngineState.STARTING, "the engine is being started")
        """Whether or not it is being drained."""
        self.recoveries: deque[Recovery] = deque(maxlen=_NUM_RECOVERIES)
        """The last ones, in order."""
        self.num_recoveries = 0
        self.scheduler_place: Place | None = None
        self.places: tuple[Place, ...] = ()
        """Of all ranks. As of the last group that formed."""
        self.faults = FaultCounts()
        self.shape = shape or Shape.of(spec.config.parallel)
        """Of the last group that formed, or of the first one to come."""
        self._device: Device = "cpu"
        self._epoch = -1
        self._drain_reason = ""
        self._resizes = ResizeDesk()
        self._start_seconds = spec.config.server.group_start_seconds
        self._deaths = DeathLog()
        self._scheduler = SchedulerHandle()
        self._workers: WorkerGroup | None = None
        self._running: asyncio.Task[None] | None = None

    @property
    def info(self) -> EngineInfo:
        return self._own_info.while_draining(self._drain_reason)

    @property
    def scheduler(self) -> Any:
        """The handle of the scheduler actor once requests may go there, else None."""
        return self._scheduler.actor if self._scheduler.has_begun else None

    @property
    def scheduler_id(self) -> str:
        """Another one for each scheduler."""
        return self._scheduler.id

    def start(self) -> None:
        """Begin; `info` says how far things are, and what became of them."""
        self._running = asyncio.create_task(self._run(), name="engine")

    async def drain(self, reason: str, timeout_seconds: float) -> int | None:
        """Take nothing new, for `reason`, and let go on what was accepted, also what only waits.

        Returns when all of it has ended, by itself or after `timeout_seconds` with an error; how
        many the latter were, or None if the engine failed or takes requests again, or is drained
        for another reason now. It stays, until `undrain` lets it take requests again.
        """
        await self._set_drain(reason)
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._wait_drained()
                has_failed = self.info.state is EngineState.FAILED
                return None if has_failed or self._drain_reason != reason else 0
        except TimeoutError:
            if self._drain_reason != reason:
                return None
            had = f", and what ran had {timeout_seconds:g} s to end" if timeout_seconds else ""
            return await self._scheduler.end_all(f"{reason}{had}")

    async def undrain(self) -> None:
        """Take requests again."""
        await self._set_drain("")

    async def _set_drain(self, reason: str) -> None:
        self._drain_reason = reason
        self._report()
        await self._scheduler.set_drain(reason)

    async def _wait_drained(self) -> None:
        """Over all the schedulers that there may be meanwhile."""
        while self.info.state is EngineState.DRAINING or self._is_starting_for_somebody:
            with contextlib.suppress(ray.exceptions.RayError):
                if self.scheduler is not None:
                    await self.scheduler.wait_drained.remote()
                    return
            await asyncio.sleep(_DRAIN_TICK_SECONDS)  # another one is on its way

    @property
    def _is_starting_for_somebody(self) -> bool:
        return self.info.state is EngineState.STARTING and self._is_awaited()

    async def close(self, reason: str) -> None:
        """End what is left of requests with `reason`, then every process, and give the resources
        back. Safe to call again."""
        await self.drain(reason, 0.0)
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        self._resizes.close(reason)
        await self._scheduler.lose(self._epoch, reason)
        if self._workers is not None:
            await self._workers.close()
        self._scheduler.kill()

    async def resize(self, shape: Shape) -> None:
        """Go on with workers of another shape; returns when their group stands.

        What ran waits meanwhile, as after any interruption. Raises ResizeError if that is refused,
        with nothing changed, or if the new group was not there within `server.group_start_seconds`
        and the old one was restored.
        """
        with self._resizes.taken(shape, self.info):
            if shape == self.shape:
                return
            await self._check_resize(shape)
            await self._resizes.carry_out(shape)

    async def _check_resize(self, shape: Shape) -> None:
        """Raises ResizeError for what the model or the machines do not allow."""
        workers = self._workers
        assert workers is not None, "there is a group, or there was one"
        try:
            parallel = self._resolved(shape).parallel
            await workers.check_shape(parallel)
            await asyncio.to_thread(check_room, parallel, workers.placement)
        except (ConfigError, ray.exceptions.RayTaskError) as error:
            raise ResizeError(sentence(error)) from error

    def _resolved(self, shape: Shape) -> ResolvedConfig:
        """What holds for a group of `shape`."""
        return resolve(shape.applied(self._config), self._device)

    async def forget(self, client_id: str) -> None:
        """An ingress replica is gone for good: end its requests."""
        if self.scheduler is not None:
            with contextlib.suppress(ray.exceptions.RayError):
                await self.scheduler.forget.remote(client_id)

    async def status(self) -> Any:
        """The scheduler's status, or None while it cannot be asked."""
        if self.scheduler is None:
            return None
        return await self.scheduler.status.remote()

    # -- life ----------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            await self._live()
        except Exception as error:
            reason = start_failure(error, self._start_seconds)
            if not isinstance(error, EngineStartError | ray.exceptions.RayError | TimeoutError):
                logger.exception("the engine cannot go on")
            logger.error("engine of epoch %d: %s", self._epoch, reason)
            self._set_info(EngineState.FAILED, reason)
            self._resizes.close(reason)
            await self._scheduler.give_up(reason)
            if self._workers is not None:
                await self._workers.close()

    async def _live(self) -> None:
        """Start, and mend what is lost, for as long as that makes sense."""
        self._device = choose_device(self.spec.config.parallel)
        try:
            await self._form(self.shape, waits=self._is_awaited())
        except Exception as error:
            if not self._is_awaited():
                raise
            await self._recover(start_failure(error, self._start_seconds))
        while True:
            await self._recover(await self._first_loss())

    async def _recover(self, reason: str) -> None:
        """Form another group, in as many attempts as it takes, and of another shape if wanted.

        Raises EngineStartError when it is given up.
        """
        noticed_seconds, first_reason = time.time(), reason
        is_fault = is_death = self._resizes.wanted is None
        while True:
            shape = self._resizes.wanted or self.shape
            is_resize = shape != self.shape
            self._set_info(EngineState.RECOVERING, reason)
            cause = InterruptionCause.RESIZE if is_resize else InterruptionCause.WORKER_LOST
            has_begun = self._scheduler.begun_epoch == self._epoch
            loss = await self._scheduler.lose(self._epoch, reason, cause)
            num_steps = await self._leave(shape)
            # Ranks that never came to this epoch tell of the one before.
            has_progress = has_begun and num_steps > 0
            if loss is not None:
                noticed_seconds = min(noticed_seconds, loss.lost_seconds)
                has_progress = loss.num_steps > 0 or loss.found_culprit
            left_seconds = time.time()
            if is_death:
                await self._mourn(reason, has_progress=has_progress)
            try:
                formed = await self._form_unless_resized(shape)
            except Exception as error:
                reason = start_failure(error, self._start_seconds)
                is_death = not is_resize
                logger.warning("epoch %d could not begin: %s", self._epoch, reason)
                if is_resize:
                    self._resizes.failed(reason)
                    first_reason = f"{shape} did not come up: {reason}"
                continue
            if formed is None:
                reason, is_death = self._resize_reason, False
                continue
            recovery = Recovery(
                epoch=self._epoch,
                reason=first_reason,
                replaced=formed[0],
                noticed_seconds=noticed_seconds,
                left_seconds=left_seconds,
                loaded_seconds=formed[1],
                joined_seconds=time.time(),
            )
            self.shape = shape
            await self._recovered(recovery, is_fault=is_fault)
            return

    async def _leave(self, shape: Shape) -> int:
        """Let all ranks leave their group, and end them unless the next one has the same `shape`.

        How many steps a rank has done in the epoch that it joined last.
        """
        if self._workers is None:
            return 0
        num_steps = await self._workers.leave()
        if self._workers.shape != shape:
            await self._workers.close()
            self._workers = None
        return num_steps

    async def _mourn(self, reason: str, *, has_progress: bool) -> None:
        """Count a death. Raises EngineStartError if it was one too many."""
        self._deaths.died(time.monotonic(), after_progress=has_progress)
        if self._deaths.is_hopeless:
            raise EngineStartError(
                f"given up after {MAX_DEATHS} deaths in {WINDOW_SECONDS / 60:.0f} minutes "
                f"without a step in between; the last one: {reason}"
            )
        await asyncio.sleep(self._deaths.pause_seconds)

    async def _recovered(self, recovery: Recovery, *, is_fault: bool) -> None:
        logger.info("recovered: %s", recovery)
        self.recoveries.append(recovery)
        self.num_recoveries += 1
        if is_fault:
            self.faults.recovered(recovery.joined_seconds - recovery.noticed_seconds)
        await self._scheduler.tell(self.faults.report())
        self._resizes.stands(self.shape)

    async def _form_unless_resized(self, shape: Shape) -> tuple[tuple[str, ...], float] | None:
        """See `_form`; None if another shape is wanted before the group has formed."""
        is_resize = shape != self.shape
        forming = asyncio.ensure_future(self._form(shape, waits=not is_resize))
        if is_resize:
            return await forming
        wanted = asyncio.ensure_future(self._resizes.until_wanted())
        done = await first_done(forming, wanted)
        return forming.result() if forming in done else None

    async def _form(self, shape: Shape, *, waits: bool) -> tuple[tuple[str, ...], float]:
        """Start what is missing, and let a group of `shape` form under the next epoch.

        `waits`: while no machine has room for some rank, the time does not count. Which processes
        are new, and when the model was loaded everywhere. Raises EngineStartError after
        `server.group_start_seconds`.
        """
        config = self._resolved(shape)
        self._epoch = self._next_epoch()
        new = [] if self._scheduler.is_there else ["scheduler"]
        self._scheduler.start_if_missing(config)
        if self._workers is None:
            placement = reserve(config.parallel, self._device)
            self._workers = WorkerGroup(placement, self.spec.loader, config, self._device)
        workers = self._workers
        new += [f"worker {rank}" for rank in workers.start_missing()]
        if waits:
            self.faults.restarted(new)
        async with workers.placement.time_limit(
            self._start_seconds, waits=waits, tell=self._tell_progress
        ):
            joining = asyncio.ensure_future(self._load_and_join(workers, config))
            hangs = [
                asyncio.ensure_future(workers.first_hang()),
                asyncio.ensure_future(self._scheduler.first_hang()),
            ]
            done = await first_done(joining, *hangs)
            if joining not in done:
                raise EngineStartError(done.pop().result())
        self._set_info(EngineState.READY)
        return tuple(new), joining.result()

    async def _load_and_join(self, workers: WorkerGroup, config: ResolvedConfig) -> float:
        """When the model was loaded everywhere."""
        await workers.load(self._tell_progress)
        loaded_seconds = time.time()
        places = await places_of(self._scheduler, workers)
        self.scheduler_place, self.places = places.scheduler, places.ranks
        if self._drain_reason:
            await self._scheduler.set_drain(self._drain_reason)
        await join(
            self._scheduler,
            workers,
            places,
            epoch=self._epoch,
            replicas=self._replicas(),
            config=config,
            device=self._device,
        )
        return loaded_seconds

    async def _first_loss(self) -> str:
        """Wait until any process of the group is lost, or another shape is wanted; the reason."""
        assert self._workers is not None, "a group has formed"
        worker = asyncio.ensure_future(self._workers.first_end())
        scheduler = asyncio.ensure_future(self._scheduler.wait_lost(self._epoch))
        hang = asyncio.ensure_future(self._workers.first_hang())
        wanted = asyncio.ensure_future(self._resizes.until_wanted())
        done = await first_done(worker, scheduler, hang, wanted)
        for loss in (scheduler, worker, hang):
            if loss in done:
                return loss.result()
        return self._resize_reason

    # -- what is told --------------------------------------------------------------------

    @property
    def _resize_reason(self) -> str:
        return f"the workers change from {self.shape} to {self._resizes.wanted}"

    def _tell_progress(self, text: str) -> None:
        is_first = self._own_info.state is EngineState.STARTING
        self._set_info(EngineState.STARTING if is_first else EngineState.RECOVERING, text)

    def _set_info(self, state: EngineState, reason: str = "") -> None:
        self._own_info = EngineInfo(state, reason, epoch=self._epoch)
        if state is EngineState.RECOVERING:
            self._scheduler.explain(reason)
        self._report()
