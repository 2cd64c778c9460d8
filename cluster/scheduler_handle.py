"""The scheduler's process, as the engine that owns it sees it: it may be gone at any moment."""

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Collection
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.processes import SchedulerProcess, place_here
from cluster.ray_errors import awaited, first_done, sentence
from configs import ResolvedConfig
from scheduler.crash import CrashLog
from scheduler.errors import CoreCrashedError
from scheduler.group import GroupSize
from scheduler.messages import InterruptionCause, Tally, encode
from scheduler.step_loop import GroupLoss

logger = logging.getLogger(__name__)

_PING_SECONDS = 5.0
_HANG_SECONDS = 30.0
"""A scheduler that does not answer for so long is stuck. It never waits for a step."""
_ANSWER_SECONDS = 10.0
"""The same when something is known to be wrong."""


class SchedulerHandle:
    def __init__(self) -> None:
        self.actor: Any = None
        """None: there is no process."""
        self.id = ""
        """Another one for each process."""
        self.has_begun = False
        """It has a core, so requests may go there."""
        self.begun_epoch = -1
        """The last one that it was told to go on under."""
        self._crashes = CrashLog()

    @property
    def is_there(self) -> bool:
        return self.actor is not None

    def start_if_missing(self, config: ResolvedConfig) -> None:
        if self.actor is not None:
            return
        # A soft affinity would not do: without resources Ray takes it for none at all.
        beside_me = NodeAffinitySchedulingStrategy(place_here().node_id, soft=False)
        options = ray.remote(SchedulerProcess).options(
            num_cpus=0,
            max_restarts=0,
            max_concurrency=10_000,
            scheduling_strategy=beside_me,
            # Ray would note every call of every replica.
            enable_task_events=False,
        )
        self.actor, self.id = options.remote(config), uuid.uuid4().hex
        self.has_begun, self.begun_epoch = False, -1

    async def begin(self, epoch: int, size: GroupSize, replicas: Collection[str]) -> None:
        """See `SchedulerActor.begin`."""
        self.begun_epoch = epoch
        await self.actor.begin.remote(epoch, size, tuple(replicas), self._crashes.culprits)
        self.has_begun = True

    async def wait_lost(self, epoch: int) -> str:
        """Returns when the scheduler has lost the group of `epoch`, or is lost itself; why."""
        lost = asyncio.ensure_future(awaited(self.actor.wait_lost.remote(epoch)))
        hang = asyncio.ensure_future(self.first_hang())
        try:
            if lost in await first_done(lost, hang):
                return str(lost.result().reason)
            return hang.result()
        except ray.exceptions.RayError as error:
            self._note_crash(error)
            return f"the scheduler is lost: {sentence(error)}"

    async def first_hang(self) -> str:
        """Wait until a process that has answered once does so no longer; for how long."""
        actor = self.actor
        try:
            await actor.place.remote()
            while True:
                await asyncio.sleep(_PING_SECONDS)
                async with asyncio.timeout(_HANG_SECONDS):
                    await actor.ping.remote()
        except TimeoutError:
            return f"the scheduler has not answered for {_HANG_SECONDS:g} s"
        except ray.exceptions.RayError:
            return await asyncio.Future()  # its other calls fail, and say so

    async def lose(
        self, epoch: int, reason: str, cause: InterruptionCause = InterruptionCause.WORKER_LOST
    ) -> GroupLoss | None:
        """Let all that runs in `epoch` wait; None if there is nobody who could tell of it.

        A process that died, or does not answer, is forgotten.
        """
        if self.actor is None:
            return None
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                await self.actor.ping.remote()
                if self.begun_epoch != epoch:
                    return None
                loss: GroupLoss = await self.actor.lose.remote(epoch, reason, cause)
                return loss
        except TimeoutError:
            why = "it does not answer"
        except ray.exceptions.RayError as error:
            why = sentence(error)
            self._note_crash(error)
        logger.warning("the scheduler is replaced: %s", why)
        self.kill()
        return None

    def _note_crash(self, error: ray.exceptions.RayError) -> None:
        crash = getattr(error, "cause", None)
        if isinstance(crash, CoreCrashedError):
            self._crashes.note(self.id, crash)

    def explain(self, reason: str) -> None:
        """Let clients know what the way to the next group is waiting for."""
        if self.actor is not None:
            self.actor.explain.remote(reason)

    async def tell(self, counts: Tally) -> None:
        """Let what the engine has counted be part of the metrics."""
        await self._ask("exchange_counts", encode(counts))

    async def set_drain(self, reason: str) -> None:
        """See `SchedulerActor.set_drain`."""
        await self._ask("set_drain", reason)

    async def end_all(self, reason: str) -> int:
        """End all requests, with `reason`; how many that were."""
        return int(await self._ask("end_all", reason) or 0)

    async def give_up(self, reason: str) -> None:
        """End all requests, with `reason`. The process stays, to tell its clients."""
        await self._ask("give_up", reason)

    async def _ask(self, method: str, *arguments: object) -> Any:
        """What the process answers; None if it is not there, or does not answer in time."""
        if self.actor is None:
            return None
        with contextlib.suppress(TimeoutError, ray.exceptions.RayError):
            async with asyncio.timeout(_ANSWER_SECONDS):
                return await getattr(self.actor, method).remote(*arguments)
        return None

    def kill(self) -> None:
        actor, self.actor, self.has_begun = self.actor, None, False
        if actor is not None:
            ray.kill(actor)  # no error if it is dead already
