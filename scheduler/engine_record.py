"""What the scheduler knows of its engine, and those who wait for it to change."""

import asyncio
from collections.abc import Callable

import msgspec

from scheduler.errors import CoreCrashedError
from scheduler.group import GroupSize
from scheduler.messages import EngineInfo, EngineState
from scheduler.step_loop import GroupLoss, Load


class EngineRecord:
    """Lives on an event loop. Whoever waits gets a CoreCrashedError once there is one."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        """`on_change` is called whenever `info` may say something else, but for the load."""
        self._on_change = on_change
        self._info = EngineInfo(EngineState.STARTING, "the workers are not there yet")
        self._drain_reason = ""
        self._joined_epoch = -1
        self._loss: GroupLoss | None = None
        self._changed = asyncio.Event()
        self.crash: CoreCrashedError | None = None

    @property
    def info(self) -> EngineInfo:
        """As replicas are told."""
        return self._info.while_draining(self._drain_reason)

    @property
    def has_failed(self) -> bool:
        return self._info.state is EngineState.FAILED

    @property
    def is_draining(self) -> bool:
        return bool(self._drain_reason) and not self.has_failed

    @property
    def is_busy(self) -> bool:
        return bool(self._info.running_requests or self._info.waiting_requests)

    # -- what happens to it -----------------------------------------------------------------

    def forms(self, epoch: int, size: GroupSize, block_size: int) -> None:
        """A group is there, and its ranks are joining it."""
        self._info = msgspec.structs.replace(
            self._info,
            reason="the workers are joining their group",
            epoch=epoch,
            max_model_len=size.max_model_len,
            vocab_size=size.vocab_size,
            block_size=block_size,
            num_blocks=size.num_blocks,
        )

    def joined(self, epoch: int) -> None:
        self._joined_epoch = epoch
        self._become(EngineState.READY)

    def has_load(self, load: Load) -> None:
        self._info = msgspec.structs.replace(
            self._info,
            running_requests=load.running_requests,
            waiting_requests=load.waiting_requests,
            waiting_tokens=load.waiting_tokens,
            tokens_per_second=load.tokens_per_second,
        )

    def lost(self, loss: GroupLoss) -> None:
        self._loss = loss
        self._become(EngineState.RECOVERING, loss.reason)

    def recovers(self, reason: str) -> None:
        """What the way to the next group is waiting for, if it is on that way."""
        if self._info.state is EngineState.RECOVERING:
            self._become(EngineState.RECOVERING, reason)

    def drains(self, reason: str) -> None:
        """It takes nothing new, for `reason`; without one, it takes requests again."""
        self._drain_reason = reason
        self._tell()

    def failed(self, reason: str) -> None:
        """For good."""
        self._become(EngineState.FAILED, reason)

    def crashed(self, crash: CoreCrashedError) -> None:
        self.crash = crash
        self._tell()

    def _become(self, state: EngineState, reason: str = "") -> None:
        if not self.has_failed:
            self._info = msgspec.structs.replace(self._info, state=state, reason=reason)
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._on_change()

    # -- who waits for it -------------------------------------------------------------------

    async def until_joined(self, epoch: int) -> None:
        """Raises RuntimeError with the reason if the group is lost before all ranks have joined."""
        await self._until(lambda: self._joined_epoch == epoch or self._loss_of(epoch) is not None)
        loss = self._loss_of(epoch)
        if loss is not None:
            raise RuntimeError(loss.reason)

    async def until_first_joined(self) -> None:
        await self._until(lambda: self._joined_epoch >= 0)

    async def until_lost(self, epoch: int) -> GroupLoss:
        await self._until(lambda: self._loss_of(epoch) is not None)
        loss = self._loss_of(epoch)
        assert loss is not None
        return loss

    async def _until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            if self.crash is not None:
                raise self.crash
            self._changed.clear()
            await self._changed.wait()

    def _loss_of(self, epoch: int) -> GroupLoss | None:
        """The last loss, if it was of `epoch` or a later one."""
        loss = self._loss
        return loss if loss is not None and loss.epoch >= epoch else None
