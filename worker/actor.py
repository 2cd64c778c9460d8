"""The life cycle around one rank: load once, then join, run and leave, epoch after epoch.

    load ──► join ──► run ──► (left, or failed) ──► join ──► run …

`load`, `join` and `run` belong to one thread, on which everything of the device happens; all else
comes from other threads. It is a plain class: Ray makes an actor of it, a test uses
it as it is.
"""

import logging
import random
import socket
import time
from collections.abc import Callable
from typing import Protocol, TypeAlias

import msgspec

from configs import Device, ParallelConfig, ResolvedConfig
from scheduler.messages import (
    Heartbeat,
    JoinGroup,
    StepPlan,
    StepResult,
    WorkerFault,
    WorkerHello,
    decode,
    encode,
)
from worker.ports import WorkerLink, WorkerLinkOffer

logger = logging.getLogger(__name__)

_HEARTBEAT_SECONDS = 1.0
_MAX_MESSAGE_CHARACTERS = 2000


class LoadedRank(Protocol):
    """One rank with its weights, which outlive epochs."""

    def join(self, message: JoinGroup, listener: socket.socket | None) -> WorkerHello:
        """Find the other ranks, agree on the number of blocks, and be ready for step 0.

        `listener` is the open socket at the address of the group's store, on rank 0. Raises if
        the others do not come in time, or if the memory granted is too small.
        """
        ...

    def execute(self, plan: StepPlan) -> StepResult | None:
        """Run one plan to its end; a result on the rank that answers, None on the others."""
        ...

    def check_shape(self, parallel: ParallelConfig) -> None:
        """Raises ConfigError or ModelError if the model cannot be spread so. From any thread."""
        ...

    def abort(self) -> None:
        """Make whatever waits for other ranks raise soon. From any thread."""
        ...

    def leave(self) -> None:
        """Give up the group. The weights stay."""
        ...


RankLoader: TypeAlias = Callable[[ResolvedConfig, Device, int], LoadedRank]
"""From (configuration, device, rank) to its weights in memory."""


class WorkerActor:
    def __init__(
        self, loader: RankLoader, config: ResolvedConfig, device: Device, rank: int
    ) -> None:
        self._loader = loader
        self._config = config
        self._device = device
        self._rank = rank
        self._loaded: LoadedRank | None = None
        self._link: WorkerLink | None = None
        self._listener: socket.socket | None = None
        self._epoch = -1
        self._num_steps = 0
        self._leaving = False

    def listen(self, host: str, ports: range) -> int:
        """Open the port at which the ranks of the next group will meet, on `host` alone.

        Raises OSError if none of `ports` is free.
        """
        self._close_listener()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        for port in random.sample(ports, k=len(ports)):
            listener = socket.socket(family)
            try:
                listener.bind((host, port))
            except OSError:
                listener.close()
                continue
            listener.listen()
            self._listener = listener
            return port
        raise OSError(f"no free port on {host} from {ports.start} to {ports.stop - 1}")

    def load(self) -> None:
        """Bring the weights into memory; does nothing when they are there."""
        if self._loaded is None:
            self._loaded = self._loader(self._config, self._device, self._rank)

    def check_shape(self, parallel: ParallelConfig) -> bool:
        """See `LoadedRank.check_shape`; False before `load`, when nobody can tell."""
        loaded = self._loaded
        if loaded is not None:
            loaded.check_shape(parallel)
        return loaded is not None

    def join(self, data: bytes) -> bytes:
        """A JoinGroup in, a WorkerHello out; returns when all ranks have found each other."""
        assert self._loaded is not None, "join comes after load"
        message = decode(data, JoinGroup)
        self._epoch, self._num_steps, self._leaving = message.epoch, 0, False
        listener, self._listener = self._listener, None
        return encode(self._loaded.join(message, listener))

    def run(self, offer: WorkerLinkOffer) -> None:
        """Obey the plans of the epoch; returns when told to leave.

        Raises what made it impossible to go on, after the scheduler was told.
        """
        assert self._loaded is not None, "run comes after join"
        link = self._link = offer.open()
        loop = _PlanLoop(self._loaded, link, epoch=self._epoch, rank=self._rank)
        try:
            while not self._leaving:
                loop.turn()
                self._num_steps = loop.next_step_id
        except Exception as error:
            if self._leaving:
                return
            logger.exception("rank %d cannot go on in epoch %d", self._rank, self._epoch)
            link.send(
                WorkerFault(
                    epoch=self._epoch,
                    step_id=loop.next_step_id,
                    rank=self._rank,
                    kind=type(error).__name__,
                    message=str(error)[:_MAX_MESSAGE_CHARACTERS],
                )
            )
            raise
        finally:
            self._link = None
            link.close()
            self._loaded.leave()

    def leave(self) -> int:
        """End the `run` that is underway, also when it waits for ranks that are gone.

        How many steps of the epoch this rank has done.
        """
        self._leaving = True
        self._close_listener()
        link, loaded = self._link, self._loaded
        if loaded is not None:
            loaded.abort()
        if link is not None:
            link.wake()
        return self._num_steps

    def _close_listener(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()


class _PlanLoop:
    """One plan after the other, with a sign of life when none comes."""

    def __init__(self, loaded: LoadedRank, link: WorkerLink, *, epoch: int, rank: int) -> None:
        self._loaded = loaded
        self._link = link
        self._epoch = epoch
        self._rank = rank
        self.next_step_id = 0
        self._ended_seconds = time.perf_counter()
        self._heartbeat()

    def turn(self) -> None:
        plan = self._link.receive(_HEARTBEAT_SECONDS)
        if plan is not None:
            began_seconds = time.perf_counter()
            gap_seconds = began_seconds - self._ended_seconds
            result = self._loaded.execute(plan)
            self._ended_seconds = time.perf_counter()
            self.next_step_id = plan.step_id + 1
            if result is not None:
                self._link.send(msgspec.structs.replace(result, gap_seconds=gap_seconds))
        if time.perf_counter() - self._heartbeat_seconds > _HEARTBEAT_SECONDS:
            self._heartbeat()

    def _heartbeat(self) -> None:
        self._heartbeat_seconds = time.perf_counter()
        self._link.send(Heartbeat(self._epoch, self._rank, self.next_step_id))
