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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import msgspec

from configs import ResolvedConfig
from scheduler.core import SchedulerCore
from scheduler.errors import GroupLostError
from scheduler.messages import (
    AbortRequests,
    EndReason,
    EndRequest,
    EngineInfo,
    EngineState,
    PollAnswer,
    SubmitRequests,
    TokenBatch,
    Unavailable,
    decode,
    encode,
)
from scheduler.outbox import Outbox
from scheduler.ports import PlanLink, PlanLinkOffer
from scheduler.status import Counters, SchedulerStatus, Timings
from scheduler.step_loop import Load, StepLoop

logger = logging.getLogger(__name__)

T = TypeVar("T")

POLL_SECONDS = 5.0
"""How long a poll waits for news."""
CLIENT_LOST_SECONDS = 15.0
"""A replica that has not polled for so long is gone, and its requests are ended."""
_TICK_SECONDS = 1.0
_DRAIN_TICK_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class GroupSize:
    """What the workers of a group agreed on."""

    num_ranks: int
    num_blocks: int
    """With the null block."""
    max_model_len: int
    vocab_size: int


@dataclass(slots=True)
class _Client:
    """One ingress replica."""

    last_seen_seconds: float
    outbox: Outbox = field(default_factory=Outbox)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    num_polls: int = 0


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
        """`on_crash` is called on the thread of the step loop after the core raised, `on_idle` on
        the event loop about a second after the last request has ended."""
        self._config = config
        self.on_crash = on_crash
        self._on_idle = on_idle
        self._link: PlanLink | None = None
        self._loop: StepLoop | None = None
        self._clients: dict[str, _Client] = {}
        self._info = EngineInfo(EngineState.STARTING, "the workers are not there yet")
        self._settled = asyncio.Event()
        self._ticker: asyncio.Task[None] | None = None

    # -- supervisor ---------------------------------------------------------------------

    async def open_link(self, offer: PlanLinkOffer) -> str:
        """Open the link to a group that is about to form; the address for its workers."""
        self._link = offer.open()
        return self._link.address

    async def begin(self, epoch: int, size: GroupSize) -> None:
        """Start the step loop over the open link; returns when all ranks have joined.

        Raises RuntimeError with the reason if the group is lost before that.
        """
        assert self._link is not None, "begin comes after open_link"
        config = self._config
        core = SchedulerCore(
            scheduler=config.scheduler,
            cache=config.cache,
            num_blocks=size.num_blocks,
            max_model_len=size.max_model_len,
            pipeline_stages=config.parallel.pipeline_parallel_size,
            epoch=epoch,
        )
        self._info = EngineInfo(
            state=EngineState.STARTING,
            reason="the workers are joining their group",
            epoch=epoch,
            max_model_len=size.max_model_len,
            vocab_size=size.vocab_size,
            block_size=config.cache.block_size,
            num_blocks=size.num_blocks,
        )
        self._loop = StepLoop(
            core,
            self._link,
            num_ranks=size.num_ranks,
            step_deadline_seconds=config.server.step_deadline_seconds,
            listener=_OnEventLoop(self, asyncio.get_running_loop()),
        )
        self._loop.start()
        self._ticker = asyncio.create_task(self._tick(), name="clients")
        await self._settled.wait()
        if self._info.state is EngineState.FAILED:
            raise RuntimeError(self._info.reason)

    async def drain(self, reason: str) -> None:
        """Take nothing new; returns when all that was accepted has ended and was told."""
        if self._info.state is EngineState.READY:
            self._set_state(EngineState.DRAINING, reason)
        while self._info.state is EngineState.DRAINING:
            num_open = await self._run(lambda core, now: len(core.requests))
            if not num_open and all(c.outbox.is_empty for c in self._clients.values()):
                return
            await asyncio.sleep(_DRAIN_TICK_SECONDS)

    async def give_up(self, reason: str) -> None:
        """The workers are lost: end all requests with an error that says `reason`."""
        if self._loop is None:
            self._set_state(EngineState.FAILED, reason)
        else:
            self._loop.lose(reason)
            await self.wait_lost()

    async def wait_lost(self) -> str:
        """Returns, with the reason, when the group is lost."""
        while self._info.state is not EngineState.FAILED:
            self._settled.clear()
            await self._settled.wait()
        return self._info.reason

    async def stop(self) -> None:
        """End the step loop; requests that are alive are dropped without a word."""
        if self._ticker is not None:
            self._ticker.cancel()
        if self._loop is not None:
            await asyncio.to_thread(self._loop.stop)

    async def status(self) -> SchedulerStatus:
        try:
            counters = await self._run(lambda core, now: Counters.of(core))
        except GroupLostError:
            return SchedulerStatus(self._info)
        timings = () if self._loop is None else tuple(self._loop.timings)
        return SchedulerStatus(self._info, counters, Timings.of(timings))

    # -- ingress ------------------------------------------------------------------------

    async def submit(self, data: bytes) -> bytes:
        """SubmitRequests in, SubmitAnswer out. Submitting the same id again changes nothing."""
        if self._loop is None or not self._info.is_ready:
            return encode(Unavailable(self._info.reason))
        messages = decode(data, SubmitRequests).requests
        for message in messages:
            self._client(message.client_id)
        try:
            answer = await self._run(lambda core, now: core.submit(messages, now))
        except GroupLostError as error:
            return encode(Unavailable(str(error)))
        return encode(answer)

    async def end(self, data: bytes) -> None:
        """An EndRequest in. Unknown ids are remembered for a while."""
        message = decode(data, EndRequest)
        with contextlib.suppress(GroupLostError):  # which has ended it
            await self._run(lambda core, now: core.end(message, now))

    async def poll(self, client_id: str, last_batch: int) -> bytes:
        """A PollAnswer: at once if there is news for this client, else after some seconds.

        A newer poll of the same client lets the older one return without news.
        """
        client = self._client(client_id)
        client.num_polls += 1
        this_poll = client.num_polls
        client.news.set()  # an older poll that is still waiting goes home
        number, batches = client.outbox.take(last_batch)
        if not batches and this_poll > 1:  # the first one is to learn the state at once
            client.news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS):
                    await client.news.wait()
            client.last_seen_seconds = time.monotonic()
            if client.num_polls == this_poll:
                number, batches = client.outbox.take(last_batch)
        return encode(PollAnswer(number, batches, self._info))

    async def abort(self, data: bytes) -> int:
        """AbortRequests in; how many sequences that ended."""
        wanted = frozenset(decode(data, AbortRequests).ids)
        return await self._run(lambda core, now: _end_by_id(wanted, core, now))

    async def reset_prefix_cache(self) -> None:
        """Forget all cached content. Raises CacheInUseError while blocks are held."""
        await self._run(lambda core, now: core.reset_prefix_cache())

    async def _run(self, function: Callable[[SchedulerCore, float], T]) -> T:
        """Let the step loop run `function`; raises GroupLostError without one."""
        if self._loop is None:
            raise GroupLostError(self._info.reason)
        return await asyncio.wrap_future(self._loop.call(function))

    # -- news from the step loop, on the event loop ---------------------------------------

    def _client(self, client_id: str) -> _Client:
        client = self._clients.get(client_id)
        if client is None:
            client = self._clients[client_id] = _Client(time.monotonic())
        client.last_seen_seconds = time.monotonic()
        return client

    def on_joined(self) -> None:
        self._set_state(EngineState.READY)

    def on_news(self, batches: Mapping[str, TokenBatch], load: Load) -> None:
        self._info = msgspec.structs.replace(
            self._info,
            running_requests=load.running_requests,
            waiting_requests=load.waiting_requests,
            waiting_tokens=load.waiting_tokens,
            tokens_per_second=load.tokens_per_second,
        )
        for client_id, batch in batches.items():
            client = self._clients.get(client_id)
            if client is not None:  # else it is gone, and its requests are being ended
                client.outbox.put(batch)
                client.news.set()

    def on_lost(self, reason: str) -> None:
        self._set_state(EngineState.FAILED, reason)

    def _set_state(self, state: EngineState, reason: str = "") -> None:
        self._info = msgspec.structs.replace(self._info, state=state, reason=reason)
        self._settled.set()
        for client in self._clients.values():
            client.news.set()

    async def _tick(self) -> None:
        was_busy = False
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            self._end_lost_clients(time.monotonic())
            is_busy = bool(self._info.running_requests or self._info.waiting_requests)
            if was_busy and not is_busy:
                self._on_idle()
            was_busy = is_busy

    def _end_lost_clients(self, now: float) -> None:
        """End what belongs to replicas that are gone."""
        gone = {
            client_id
            for client_id, client in self._clients.items()
            if now - client.last_seen_seconds > CLIENT_LOST_SECONDS
        }
        if gone and self._loop is not None:
            logger.warning("%d ingress replicas are gone; their requests end", len(gone))
            for client_id in gone:
                del self._clients[client_id]
            self._loop.call(partial(_end_all, frozenset(gone)))


class _OnEventLoop:
    """Carries news from the thread of the step loop to the actor's event loop."""

    def __init__(self, actor: SchedulerActor, event_loop: asyncio.AbstractEventLoop) -> None:
        self._actor = actor
        self._call = event_loop.call_soon_threadsafe

    def on_joined(self) -> None:
        self._call(self._actor.on_joined)

    def on_news(self, batches: Mapping[str, TokenBatch], load: Load) -> None:
        self._call(self._actor.on_news, batches, load)

    def on_lost(self, reason: str) -> None:
        self._call(self._actor.on_lost, reason)

    def on_crash(self) -> None:
        self._actor.on_crash()


def _end_by_id(ids: frozenset[str], core: SchedulerCore, now: float) -> int:
    found = [
        request.request_id
        for request in core.requests.values()
        if request.answer_id in ids or request.client_request_id in ids
    ]
    for request_id in found:
        core.end(EndRequest(request_id, EndReason.ABORT), now)
    return len(found)


def _end_all(client_ids: frozenset[str], core: SchedulerCore, now: float) -> None:
    for request in list(core.requests.values()):
        if request.client_id in client_ids:
            core.end(EndRequest(request.request_id, EndReason.ABORT), now)
