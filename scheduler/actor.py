"""The mailbox around the step loop: the calls that ingress replicas and the supervisor make.

All of its methods run on one event loop and none of them waits for a step; what needs the core
is handed to the thread of the step loop. It is a plain class: Ray makes an actor of it, a test
uses it as it is.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TypeVar

from configs import ResolvedConfig
from scheduler.clients import Clients
from scheduler.core import SchedulerCore
from scheduler.crash import without_culprits
from scheduler.engine_record import EngineRecord
from scheduler.errors import CoreCrashedError, LoopOverError
from scheduler.event_loop import OnEventLoop
from scheduler.group import GroupSize
from scheduler.messages import (
    AbortRequests,
    EndReason,
    EndRequest,
    InterruptionCause,
    PollAnswer,
    SubmitRequests,
    Tally,
    TokenBatch,
    Unavailable,
    decode,
    encode,
)
from scheduler.metrics_desk import MetricsDesk
from scheduler.ports import PlanLink, PlanLinkOffer
from scheduler.status import Counters, SchedulerStatus, Timings
from scheduler.step_loop import GroupLoss, Load, StepLoop

logger = logging.getLogger(__name__)

T = TypeVar("T")

RESUME_SECONDS = 2.0
"""How long new requests are held back for what known replicas bring from an earlier scheduler."""
_TICK_SECONDS = 1.0
_DRAIN_TICK_SECONDS = 0.05
_TELL_SECONDS = 2.0
_CRASH_SECONDS = 2.0
"""In which a process whose core has crashed can say what over."""


def _end_process() -> None:
    logging.shutdown()
    os._exit(1)


class SchedulerActor:
    def __init__(
        self,
        config: ResolvedConfig,
        *,
        on_crash: Callable[[], None] = _end_process,
        on_idle: Callable[[], None] = lambda: None,
    ) -> None:
        """Both are called on the event loop: `on_crash` a moment after the core raised, `on_idle`
        about a second after the last request has ended."""
        self._config = config
        self._end_process = on_crash
        self._on_idle = on_idle
        self._link: PlanLink | None = None
        self._loop: StepLoop | None = None
        self._clients = Clients()
        self._engine = EngineRecord(on_change=self._clients.wake)
        self._metrics = MetricsDesk()
        self._culprits: frozenset[str] = frozenset()
        self._tasks: list[asyncio.Task[None]] = []

    # -- supervisor ---------------------------------------------------------------------

    async def open_link(self, offer: PlanLinkOffer) -> str:
        """Open the link to a group that is about to form; the address for its workers."""
        if self._link is not None:  # of a group that never formed
            self._link.close()
        self._link = offer.open()
        return self._link.address

    async def begin(
        self,
        epoch: int,
        size: GroupSize,
        awaited: Collection[str] = (),
        culprits: Collection[str] = (),
    ) -> None:
        """Go on under `epoch` over the open link; returns when all ranks have joined.

        A scheduler that begins for the first time holds new requests back until the replicas
        `awaited` have resumed what they had under an earlier one; the requests `culprits` end
        when they come. Raises RuntimeError with the reason if the group is lost before all have
        joined, and CoreCrashedError.
        """
        assert self._link is not None, "begin comes after open_link"
        link, self._link = self._link, None
        self._culprits = frozenset(culprits)
        if self._loop is None:
            self._loop = self._start_loop(epoch, size, frozenset(awaited))
        self._engine.forms(epoch, size, self._config.cache.block_size)
        self._loop.begin(epoch, link, size)
        await self._engine.until_joined(epoch)

    def _start_loop(self, epoch: int, size: GroupSize, awaited: frozenset[str]) -> StepLoop:
        config = self._config
        core = SchedulerCore(
            scheduler=config.scheduler,
            cache=config.cache,
            num_blocks=size.num_blocks,
            max_model_len=size.max_model_len,
            pipeline_stages=config.parallel.pipeline_parallel_size,
            epoch=epoch,
        )
        loop = StepLoop(
            core,
            step_deadline_seconds=config.server.step_deadline_seconds,
            first_step_seconds=config.server.group_start_seconds,
            listener=OnEventLoop(self, asyncio.get_running_loop()),
        )
        loop.start()
        self._clients.wait_for(awaited)
        self._tasks = [
            asyncio.create_task(self._tick(), name="clients"),
            asyncio.create_task(self._stop_awaiting(), name="resume"),
        ]
        return loop

    async def lose(
        self, epoch: int, reason: str, cause: InterruptionCause = InterruptionCause.WORKER_LOST
    ) -> GroupLoss:
        """Somebody knows that the group of `epoch` is lost, or wants another one: all that ran
        waits for the next one.

        What was noticed first, and when, if that is known already.
        """
        assert self._loop is not None, "there was a group"
        self._loop.lose(epoch, reason, cause)
        return await self._engine.until_lost(epoch)

    async def explain(self, reason: str) -> None:
        """What the way to the next group is waiting for, to be told to whoever asks."""
        self._engine.recovers(reason)

    async def ping(self) -> None:
        """Returns when the step loop has come round. Raises CoreCrashedError."""
        if self._loop is not None:
            await self._run(lambda core, now: None)

    async def wait_lost(self, epoch: int) -> GroupLoss:
        """Returns when the group of `epoch` is lost. Raises CoreCrashedError."""
        return await self._engine.until_lost(epoch)

    async def set_drain(self, reason: str) -> None:
        """Take nothing new, for `reason`; without one, take requests again."""
        self._engine.drains(reason)

    async def wait_drained(self) -> None:
        """Returns when all that was accepted has ended and was told, or nothing of it matters any
        more: requests are taken again, or the engine was given up."""
        await self._clients.all_resumed.wait()
        while self._engine.is_draining:
            num_open = await self._run(lambda core, now: len(core.requests))
            if not num_open and self._clients.are_all_here and await self._all_is_told():
                return
            await asyncio.sleep(_DRAIN_TICK_SECONDS)

    async def end_all(self, reason: str) -> int:
        """End all requests with an error that says `reason`; how many that were.

        Returns when their clients have been told, or after a moment.
        """
        num_ended = 0
        with contextlib.suppress(LoopOverError, TimeoutError):
            num_ended = await self._run(lambda core, now: core.end_all(reason, now))
            async with asyncio.timeout(_TELL_SECONDS):
                while not await self._all_is_told():
                    await asyncio.sleep(_DRAIN_TICK_SECONDS)
        return num_ended

    async def _all_is_told(self) -> bool:
        """Clients have got all that the core had to say."""
        has_news = await self._run(lambda core, now: core.has_news)
        return not has_news and self._clients.have_everything

    async def give_up(self, reason: str) -> None:
        """There will be no workers: end all requests, as `end_all` does, and take no others."""
        self._engine.failed(reason)
        await self.end_all(reason)

    async def forget(self, client_id: str) -> None:
        """A replica is gone: end what belongs to it. It may come back, and bring it again."""
        logger.warning("ingress replica %s is gone; its requests end", client_id)
        self._clients.forget(client_id)
        if self._loop is None:
            return
        self._clients.mute(client_id)
        abandoned = self._loop.call(lambda core, now: core.abandon(client_id, now))
        # In line behind all news from before.
        unmute = partial(self._clients.unmute, client_id)
        run_soon = asyncio.get_running_loop().call_soon_threadsafe
        abandoned.add_done_callback(lambda _: run_soon(unmute))

    async def stop(self) -> None:
        """End the step loop; requests that are alive are dropped without a word."""
        for task in self._tasks:
            task.cancel()
        if self._loop is not None:
            await asyncio.to_thread(self._loop.stop)

    async def status(self) -> SchedulerStatus:
        try:
            counters = await self._run(lambda core, now: Counters.of(core))
        except LoopOverError:
            return SchedulerStatus(self._engine.info)
        timings = () if self._loop is None else tuple(self._loop.timings)
        return SchedulerStatus(self._engine.info, counters, Timings.of(timings))

    # -- ingress ------------------------------------------------------------------------

    async def resume(self, client_id: str, data: bytes) -> bytes:
        """What a replica has that is not known here: SubmitRequests in, SubmitAnswer out.

        It may be empty. From now on polls of the replica bring batches.
        """
        answer = await self._submit(data)
        self._clients.resumed(client_id)
        return answer

    async def submit(self, data: bytes) -> bytes:
        """SubmitRequests in, SubmitAnswer out. Submitting the same id again changes nothing."""
        if self._engine.info.takes_requests:
            await self._clients.all_resumed.wait()
        info = self._engine.info
        if not info.takes_requests:
            return encode(Unavailable(info.reason))
        return await self._submit(data)

    async def _submit(self, data: bytes) -> bytes:
        messages = decode(data, SubmitRequests).requests
        for message in messages:
            self._clients.see(message.client_id)
        innocent, ends = without_culprits(messages, self._culprits)
        try:
            answer = await self._run(lambda core, now: core.submit(innocent, now))
        except LoopOverError as error:
            return encode(Unavailable(str(error)))
        self._clients.put(ends)  # by now nobody who was forgotten before is mute any more
        return encode(answer)

    async def end(self, data: bytes) -> None:
        """An EndRequest in. Unknown ids are remembered for a while."""
        message = decode(data, EndRequest)
        with contextlib.suppress(LoopOverError):
            await self._run(lambda core, now: core.end(message, now))

    async def poll(self, client_id: str, last_batch: int) -> bytes:
        """A PollAnswer: at once if there is news for this client, else after some seconds.

        A client that is not known is told so, and nothing else. A newer poll of the same client
        lets the older one return without news. Raises CoreCrashedError.
        """
        client = self._clients.see(client_id)
        if not client.has_resumed:
            return encode(PollAnswer(0, (), self._engine.info, is_new=True))
        number, batches = await client.take(last_batch)
        if self._engine.crash is not None:
            raise self._engine.crash
        return encode(PollAnswer(number, batches, self._engine.info))

    async def exchange_counts(self, data: bytes) -> bytes:
        """A Tally in, a TallyAnswer out: what a replica knows, for what everybody counted."""
        self._metrics.take(decode(data, Tally))
        measured = None
        if self._loop is not None and not self._engine.has_failed:
            with contextlib.suppress(LoopOverError):
                measured = await self._run(self._metrics.measure_of(self._loop))
        self._metrics.forget_all_but(self._clients, time.monotonic())
        return encode(self._metrics.answer(measured))

    async def abort(self, data: bytes) -> int:
        """AbortRequests in; how many sequences that ended."""
        wanted = frozenset(decode(data, AbortRequests).ids)

        def end(core: SchedulerCore, now: float) -> int:
            found = [r.request_id for r in core.requests.values() if r.is_called(wanted)]
            for request_id in found:
                core.end(EndRequest(request_id, EndReason.ABORT), now)
            return len(found)

        return await self._run(end)

    async def reset_prefix_cache(self) -> None:
        """Forget all cached content. Raises CacheInUseError while blocks are held."""
        await self._run(lambda core, now: core.reset_prefix_cache())

    async def _run(self, function: Callable[[SchedulerCore, float], T]) -> T:
        """Let the step loop run `function`; raises LoopOverError without one, CoreCrashedError."""
        if self._loop is None:
            raise LoopOverError(self._engine.info.reason)
        try:
            return await asyncio.wrap_future(self._loop.call(function))
        except LoopOverError as over:
            raise (self._engine.crash or over) from None

    # -- news from the step loop, on the event loop ---------------------------------------

    def on_joined(self, epoch: int) -> None:
        self._engine.joined(epoch)

    def on_news(self, batches: Mapping[str, TokenBatch], load: Load) -> None:
        self._engine.has_load(load)
        self._clients.put(batches)

    def on_lost(self, loss: GroupLoss) -> None:
        self._engine.lost(loss)

    def on_crash(self, crash: CoreCrashedError) -> None:
        self._engine.crashed(crash)
        asyncio.get_running_loop().call_later(_CRASH_SECONDS, self._end_process)

    async def _stop_awaiting(self) -> None:
        """A replica that died together with the last scheduler is not waited for."""
        await self._engine.until_first_joined()
        await asyncio.sleep(RESUME_SECONDS)
        self._clients.wait_no_longer()

    async def _tick(self) -> None:
        was_busy = False
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            for client_id in self._clients.lost(time.monotonic()):
                await self.forget(client_id)
            is_busy = self._engine.is_busy
            if was_busy and not is_busy:
                self._on_idle()
            was_busy = is_busy
