"""One engine: a scheduler and a group of workers, from their first process to their last.

    reserve ─► start what is missing ─► load ─► join ─► run ─► lost ─► leave ─┐
                        ▲─────────────────────────────────────────────────────┘

Whatever dies, the way is the same: the scheduler lets all that ran wait, the others leave their
group, what died is replaced at its place, and a new group forms under the next epoch.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

import ray

from cluster.death_log import MAX_DEATHS, WINDOW_SECONDS, DeathLog
from cluster.engine_spec import EngineSpec
from cluster.errors import EngineStartError
from cluster.fault_counts import FaultCounts
from cluster.link_choice import offer_link
from cluster.placement import choose_device, reserve
from cluster.ray_errors import sentence
from cluster.scheduler_handle import SchedulerHandle
from cluster.supervisor_view import Place, Recovery
from cluster.worker_group import WorkerGroup
from configs import Device, ResolvedConfig, resolve
from scheduler.actor import GroupSize
from scheduler.messages import EngineInfo, EngineState, WorkerHello

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
    ) -> None:
        """`next_epoch` hands out epochs, `replicas` tells the ids of the ingress replicas there
        are, `report` is called whenever `info` or `scheduler` has changed."""
        self.spec = spec
        self._next_epoch = next_epoch
        self._replicas = replicas
        self._report = report
        self._own_info = EngineInfo(EngineState.STARTING, "the engine is being started")
        """Whether or not it is being drained."""
        self.recoveries: deque[Recovery] = deque(maxlen=_NUM_RECOVERIES)
        """The last ones, in order."""
        self.num_recoveries = 0
        self.scheduler_place: Place | None = None
        self.places: tuple[Place, ...] = ()
        """Of all ranks. As of the last group that formed."""
        self.faults = FaultCounts()
        self._epoch = -1
        self._drain_reason = ""
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
        while self.info.state is EngineState.DRAINING:
            with contextlib.suppress(ray.exceptions.RayError):
                if self.scheduler is not None:
                    await self.scheduler.wait_drained.remote()
                    return
            await asyncio.sleep(_DRAIN_TICK_SECONDS)  # another one is on its way

    async def close(self, reason: str) -> None:
        """End what is left of requests with `reason`, then every process, and give the resources
        back. Safe to call again."""
        await self.drain(reason, 0.0)
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        await self._scheduler.lose(self._epoch, reason)
        await self._end_processes()

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
            reason = self._told(error)
            if not isinstance(error, EngineStartError | ray.exceptions.RayError | TimeoutError):
                logger.exception("the engine cannot go on")
            logger.error("engine of epoch %d: %s", self._epoch, reason)
            self._set_info(EngineState.FAILED, reason)
            await self._scheduler.give_up(reason)
            if self._workers is not None:
                await self._workers.close()

    async def _live(self) -> None:
        """Start, and mend what is lost, for as long as that makes sense."""
        config = self.spec.config
        device = choose_device(config.parallel)
        resolved = _with_hash_seed(resolve(config, device))
        async with asyncio.timeout(config.server.group_start_seconds):
            placement = await reserve(
                config.parallel,
                device,
                timeout_seconds=config.server.group_start_seconds,
                report=lambda lacking: self._set_info(EngineState.STARTING, lacking),
            )
            self._workers = WorkerGroup(placement, self.spec.loader, resolved, device)
            await self._form(self._workers, resolved, device)
        while True:
            reason = await self._first_loss(self._workers)
            await self._recover(self._workers, resolved, device, reason)

    async def _recover(
        self, workers: WorkerGroup, config: ResolvedConfig, device: Device, reason: str
    ) -> None:
        """Form another group, in as many attempts as it takes.

        Raises EngineStartError when it is given up.
        """
        noticed_seconds, first_reason = time.time(), reason
        while True:
            self._set_info(EngineState.RECOVERING, reason)
            loss = await self._scheduler.lose(self._epoch, reason)
            num_steps = await workers.leave()
            if loss is not None:
                noticed_seconds = min(noticed_seconds, loss.lost_seconds)
                num_steps = loss.num_steps
            left_seconds = time.time()
            self._deaths.died(time.monotonic(), after_a_step=num_steps > 0)
            if self._deaths.is_hopeless:
                raise EngineStartError(
                    f"given up after {MAX_DEATHS} deaths in {WINDOW_SECONDS / 60:.0f} minutes "
                    f"without a step in between; the last one: {reason}"
                )
            await asyncio.sleep(self._deaths.pause_seconds)
            try:
                async with asyncio.timeout(config.server.group_start_seconds):
                    new, loaded_seconds = await self._form(workers, config, device)
            except Exception as error:
                reason = self._told(error)
                logger.warning("epoch %d could not begin: %s", self._epoch, reason)
                continue
            recovery = Recovery(
                epoch=self._epoch,
                reason=first_reason,
                replaced=new,
                noticed_seconds=noticed_seconds,
                left_seconds=left_seconds,
                loaded_seconds=loaded_seconds,
                joined_seconds=time.time(),
            )
            logger.info("recovered: %s", recovery)
            self.recoveries.append(recovery)
            self.num_recoveries += 1
            self.faults.recovered(recovery.joined_seconds - recovery.noticed_seconds)
            await self._scheduler.tell(self.faults.report())
            return

    async def _form(
        self, workers: WorkerGroup, config: ResolvedConfig, device: Device
    ) -> tuple[tuple[str, ...], float]:
        """Start what is missing, and let a group form under the next epoch.

        Which processes are new, and when the model was loaded everywhere.
        """
        self._epoch = self._next_epoch()
        new = [] if self._scheduler.is_there else ["scheduler"]
        self._scheduler.start_if_missing(config)
        new += [f"worker {rank}" for rank in workers.start_missing()]
        state = self._state_while_forming
        if state is EngineState.RECOVERING:
            self.faults.restarted(new)
        await workers.load(
            lambda num_ready: self._set_info(state, _loading(workers.num_ranks, num_ready))
        )
        loaded_seconds = time.time()
        scheduler_place, places = await asyncio.gather(
            self._scheduler.actor.place.remote(), workers.places()
        )
        self.scheduler_place, self.places = scheduler_place, tuple(places)
        is_local = {place.node_id for place in places} == {scheduler_place.node_id}
        link = offer_link(
            config.parallel, workers.num_ranks, None if is_local else scheduler_place.host
        )
        address = await self._scheduler.actor.open_link.remote(link.of_scheduler)
        hellos = await workers.join(self._epoch, places, is_local=is_local)
        size = group_size(hellos, config, device)
        workers.run(link, address)
        await self._begin(workers, size)
        self._set_info(EngineState.READY)
        return tuple(new), loaded_seconds

    async def _begin(self, workers: WorkerGroup, size: GroupSize) -> None:
        """Let the scheduler plan. Raises EngineStartError if a rank fails before all are there."""
        if self._drain_reason:
            await self._scheduler.set_drain(self._drain_reason)
        begun = asyncio.ensure_future(self._scheduler.begin(self._epoch, size, self._replicas()))
        # A rank that fails before it has joined would be waited for in vain.
        ended = asyncio.ensure_future(workers.first_end())
        try:
            await asyncio.wait({begun, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not begun.done():
                raise EngineStartError(ended.result())
            await begun
        finally:
            begun.cancel()
            ended.cancel()
            await asyncio.gather(begun, ended, return_exceptions=True)

    async def _first_loss(self, workers: WorkerGroup) -> str:
        """Wait until any process of the group is lost; the reason."""
        worker = asyncio.ensure_future(workers.first_end())
        scheduler = asyncio.ensure_future(self._scheduler.wait_lost(self._epoch))
        try:
            await asyncio.wait({worker, scheduler}, return_when=asyncio.FIRST_COMPLETED)
            return scheduler.result() if scheduler.done() else worker.result()
        finally:
            worker.cancel()
            scheduler.cancel()
            await asyncio.gather(worker, scheduler, return_exceptions=True)

    async def _end_processes(self) -> None:
        if self._workers is not None:
            await self._workers.close()
        self._scheduler.kill()

    # -- what is told --------------------------------------------------------------------

    @property
    def _state_while_forming(self) -> EngineState:
        is_first = self._own_info.state is EngineState.STARTING
        return EngineState.STARTING if is_first else EngineState.RECOVERING

    def _set_info(self, state: EngineState, reason: str = "") -> None:
        self._own_info = EngineInfo(state, reason, epoch=self._epoch)
        self._report()

    def _told(self, error: Exception) -> str:
        if isinstance(error, ray.exceptions.RayActorError):
            return "a process of the engine died while it was being started"
        if isinstance(error, TimeoutError):
            limit_seconds = self.spec.config.server.group_start_seconds
            return (
                f"the workers were not ready after {limit_seconds:.0f} s: raise "
                f"server.group_start_seconds if they only need longer"
            )
        return sentence(error)


def _loading(num_ranks: int, num_ready: int) -> str:
    ready = f", {num_ready} of them are ready" if num_ready else ""
    return f"{num_ranks} workers are loading the model{ready}"


def group_size(hellos: Sequence[WorkerHello], config: ResolvedConfig, device: Device) -> GroupSize:
    """What all ranks can do together.

    Raises EngineStartError if they did not load the same model, or if not even one block fits,
    and ConfigError for settings that do not go with the model's context length.
    """
    digests = {hello.model_digest for hello in hellos}
    if len(digests) > 1:
        raise EngineStartError(
            f"the workers loaded {len(digests)} different models under the name "
            f"{config.model.model}: give all machines the same files"
        )
    hello = hellos[0]
    # Whether settings go together can depend on the context length, known only now.
    resolve(config, device, model_context_tokens=hello.max_model_len)
    if hello.num_blocks < 2:
        raise EngineStartError(
            f"the memory granted to each worker holds {hello.num_blocks} KV blocks, and at least 2 "
            f"are needed: raise cache.kv_cache_memory or cache.gpu_memory_utilization"
        )
    capacity_tokens = (hello.num_blocks - 1) * config.cache.block_size
    logger.info(
        "KV cache: %d blocks of %d tokens (%.2f GiB on worker 0) hold %d tokens: %.2f requests of "
        "the full length of %d at once",
        hello.num_blocks,
        config.cache.block_size,
        hello.num_blocks * hello.block_bytes / 2**30,
        capacity_tokens,
        capacity_tokens / hello.max_model_len,
        hello.max_model_len,
    )
    return GroupSize(len(hellos), hello.num_blocks, hello.max_model_len, hello.vocab_size)


def _with_hash_seed(config: ResolvedConfig) -> ResolvedConfig:
    """Drawn once per engine, so that nobody outside can know which contents collide."""
    if config.cache.hash_seed is not None:
        return config
    cache = config.cache.model_copy(update={"hash_seed": secrets.randbits(64)})
    return config.model_copy(update={"cache": cache})
