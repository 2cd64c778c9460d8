"""One engine: a scheduler and a group of workers, from their first process to their last.

    reserve ─► start processes ─► load weights ─► join ─► run, until drained, lost or closed

An engine is never repaired: what is lost is lost for all of its requests.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.engine_spec import EngineSpec
from cluster.errors import EngineStartError
from cluster.link_choice import offer_link
from cluster.placement import Placement, choose_device, reserve
from cluster.processes import SchedulerProcess, WorkerProcess, place_here
from cluster.supervisor_view import Place
from configs import Device, ResolvedConfig, resolve
from configs.ranks import world_size
from scheduler.actor import GroupSize
from scheduler.messages import EngineInfo, EngineState, JoinGroup, WorkerHello, decode, encode

logger = logging.getLogger(__name__)

_LEAVE_SECONDS = 2.0
_LOOPBACK = "127.0.0.1"
# Calls of these methods are for the device's one thread; all others answer at any time.
_CONCURRENCY_GROUPS = {"device": 1}


@dataclass(slots=True)
class _Processes:
    """What has been started so far, and must be ended."""

    placement: Placement
    workers: list[Any] = field(default_factory=list)
    scheduler: Any = None
    runs: list[asyncio.Future[Any]] = field(default_factory=list)
    """Of each rank the call that ends with its epoch, or with its process."""


class Engine:
    def __init__(self, spec: EngineSpec, *, epoch: int, report: Callable[[], None]) -> None:
        """`report` is called whenever `info` or `scheduler` has changed."""
        self.spec = spec
        self.epoch = epoch
        self.info = EngineInfo(EngineState.STARTING, "the engine is being started")
        self._report = report
        self._processes: _Processes | None = None
        self._is_closing = False

    @property
    def scheduler(self) -> Any:
        """The handle of the scheduler actor once requests may go there, else None."""
        processes = self._processes
        has_begun = self.info.state in (EngineState.READY, EngineState.DRAINING)
        return processes.scheduler if processes is not None and has_begun else None

    async def run(self) -> None:
        """Start, and watch until the engine is lost. Raises nothing: `info` says what became."""
        try:
            reason = await self._start_and_watch()
        except asyncio.CancelledError:
            raise
        except ray.exceptions.RayTaskError as error:
            reason = _sentence(error.cause)
        except ray.exceptions.RayActorError:
            reason = "a process of the engine died while it was being started"
        except TimeoutError:
            limit_seconds = self.spec.config.server.group_start_seconds
            reason = (
                f"the workers were not ready after {limit_seconds:.0f} s: raise "
                f"server.group_start_seconds if they only need longer"
            )
        except Exception as error:
            logger.exception("the engine cannot start")
            reason = _sentence(error)
        if not self._is_closing:
            logger.error("engine of epoch %d: %s", self.epoch, reason)
            self._set_info(EngineState.FAILED, reason)
            await self._fail(reason)

    async def drain(self, reason: str, timeout_seconds: float) -> None:
        """Take nothing new; returns when everything has ended, or after `timeout_seconds`."""
        if self.info.state is not EngineState.READY or self._processes is None:
            return
        self._set_info(EngineState.DRAINING, reason)
        with contextlib.suppress(TimeoutError, ray.exceptions.RayActorError):
            async with asyncio.timeout(timeout_seconds):
                await self._processes.scheduler.drain.remote(reason)

    async def close(self) -> None:
        """End every process and give the resources back. Safe to call again."""
        self._is_closing = True
        await self._end_processes()

    async def status(self) -> Any:
        """The scheduler's status, or None while it cannot be asked."""
        if self.scheduler is None:
            return None
        return await self.scheduler.status.remote()

    async def places(self) -> tuple[Place | None, list[Place]]:
        """Of the scheduler, and of all ranks, as far as they have been started."""
        processes = self._processes
        if processes is None or processes.scheduler is None:
            return None, []
        scheduler, *workers = await asyncio.gather(
            *(actor.place.remote() for actor in (processes.scheduler, *processes.workers))
        )
        return scheduler, workers

    # -- start ---------------------------------------------------------------------------

    async def _start_and_watch(self) -> str:
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
            processes = self._processes = _Processes(placement)
            self._start_processes(processes, resolved, device)
            await self._load(processes.workers)
            await self._form_group(processes, resolved, device)
        self._set_info(EngineState.READY)
        return await _first_loss(processes)

    def _start_processes(
        self, processes: _Processes, config: ResolvedConfig, device: Device
    ) -> None:
        beside_me = NodeAffinitySchedulingStrategy(place_here().node_id, soft=True)
        processes.scheduler = (
            ray.remote(SchedulerProcess)
            .options(
                num_cpus=0,
                max_concurrency=10_000,
                scheduling_strategy=beside_me,
                # Ray would note every call of every replica.
                enable_task_events=False,
            )
            .remote(config)
        )
        worker = ray.remote(concurrency_groups=_CONCURRENCY_GROUPS)(WorkerProcess)
        for rank in range(world_size(config.parallel)):
            options = processes.placement.options_of(rank)
            handle = worker.options(max_restarts=0, **options)
            processes.workers.append(handle.remote(self.spec.loader, config, device, rank))

    async def _load(self, workers: Sequence[Any]) -> None:
        self._set_info(EngineState.STARTING, f"{len(workers)} workers are loading the model")
        loads = [_on_device(worker, "load") for worker in workers]
        for num_ready, load in enumerate(asyncio.as_completed(loads), 1):
            await load
            self._set_info(
                EngineState.STARTING,
                f"{len(workers)} workers are loading the model, {num_ready} of them are ready",
            )

    async def _form_group(
        self, processes: _Processes, config: ResolvedConfig, device: Device
    ) -> None:
        workers, scheduler = processes.workers, processes.scheduler
        places = await asyncio.gather(
            scheduler.place.remote(), *(worker.place.remote() for worker in workers)
        )
        is_local = len({place.node_id for place in places}) == 1
        link = offer_link(config.parallel, len(workers), None if is_local else places[0].host)
        address = await scheduler.open_link.remote(link.of_scheduler)
        store_host = _LOOPBACK if is_local else places[1].host
        ports = range(config.parallel.first_port, config.parallel.last_port + 1)
        store_port = await workers[0].listen.remote(store_host, ports)
        joins = [
            encode(
                JoinGroup(
                    epoch=self.epoch,
                    rank=rank,
                    host=_LOOPBACK if is_local else place.host,
                    store_host=store_host,
                    store_port=store_port,
                    store_prefix=f"epoch-{self.epoch}",
                )
            )
            for rank, place in enumerate(places[1:])
        ]
        answers = await asyncio.gather(
            *(_on_device(worker, "join", join) for worker, join in zip(workers, joins, strict=True))
        )
        hellos = [decode(data, WorkerHello) for data in answers]
        size = group_size(hellos, config, device)
        processes.runs = [
            _on_device(worker, "run", link.of_worker(rank, address))
            for rank, worker in enumerate(workers)
        ]
        begun = asyncio.ensure_future(_as_coroutine(scheduler.begin.remote(self.epoch, size)))
        # A rank that fails before it has joined would be waited for in vain.
        lost = asyncio.ensure_future(_first_loss(processes))
        await asyncio.wait({begun, lost}, return_when=asyncio.FIRST_COMPLETED)
        if not begun.done():
            begun.cancel()
            raise EngineStartError(lost.result())
        lost.cancel()
        await begun

    async def _fail(self, reason: str) -> None:
        """End the group. The scheduler stays until `close`, to tell its clients."""
        processes = self._processes
        if processes is None:
            return
        if processes.scheduler is not None:
            with contextlib.suppress(ray.exceptions.RayError):
                await processes.scheduler.give_up.remote(reason)
        await _end_workers(processes)

    async def _end_processes(self) -> None:
        processes, self._processes = self._processes, None
        if processes is None:
            return
        await _end_workers(processes)
        if processes.scheduler is not None:
            ray.kill(processes.scheduler)

    def _set_info(self, state: EngineState, reason: str = "") -> None:
        self.info = EngineInfo(state, reason, epoch=self.epoch)
        self._report()


async def _end_workers(processes: _Processes) -> None:
    """End all ranks and give their resources back. Safe to call again."""
    workers, processes.workers = processes.workers, []
    # Let ranks go in order first: they own memory that outlives a killed process.
    for worker in workers:
        worker.leave.remote()
    if processes.runs:
        await asyncio.wait(processes.runs, timeout=_LEAVE_SECONDS)
    for worker in workers:
        ray.kill(worker)  # no error if it is dead already
    processes.placement.remove()


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


def _on_device(worker: Any, method: str, *arguments: Any) -> asyncio.Future[Any]:
    """Call a method on the device's own thread."""
    reference = getattr(worker, method).options(concurrency_group="device").remote(*arguments)
    return asyncio.ensure_future(_as_coroutine(reference))


async def _first_loss(processes: _Processes) -> str:
    """Wait until any process of the group is lost; the reason."""
    loss = asyncio.ensure_future(_as_coroutine(processes.scheduler.wait_lost.remote()))
    try:
        await asyncio.wait({loss, *processes.runs}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        loss.cancel()
    for rank, run in enumerate(processes.runs):
        if run.done():
            return f"worker {rank} is lost: {_sentence(run.exception())}"
    if loss.exception() is None:
        return str(loss.result())
    return f"the scheduler is lost: {_sentence(loss.exception())}"


async def _as_coroutine(reference: Any) -> Any:
    return await reference


def _sentence(error: BaseException | None) -> str:
    if error is None:
        return "it ended"
    if isinstance(error, ray.exceptions.RayTaskError):
        return _sentence(error.cause)
    if isinstance(error, ray.exceptions.RayActorError):
        return "its process died"
    return f"{error}" or type(error).__name__
