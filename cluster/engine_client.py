"""One ingress replica's line to the engine: requests out, a stream of deltas per request back.

handlers ──submit, end──► EngineClient ──EngineCalls──► scheduler
    ▲                          │
    └── one bounded stream ◄───┴── one outstanding poll for the whole replica
         per request

Each stream keeps what a scheduler needs to go on with its request. When the scheduler dies, its
successor does not know this replica, says so, and is brought all of it: readers see a pause.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Protocol

import msgspec

from cluster.errors import EngineLostError, EngineReplacedError, EngineUnavailableError
from cluster.metrics_exchange import CountsCalls, MetricsExchange
from cluster.request_stream import RequestStream
from scheduler.messages import (
    Accepted,
    Admission,
    EndReason,
    EndRequest,
    EngineInfo,
    EngineState,
    FinishReason,
    PollAnswer,
    SubmitAnswer,
    SubmitRequest,
    TokenDelta,
    Unavailable,
)

logger = logging.getLogger(__name__)

_PAUSE_SECONDS = 0.5
_LOST_PAUSE_SECONDS = 0.02


class EngineCalls(CountsCalls, Protocol):
    """How the engine is reached: over Ray, or in the same process.

    Every call raises EngineLostError when the scheduler it would go to is gone, and again until
    there is another one; only `poll` then tells what is known of the engine.
    """

    async def submit(self, messages: Sequence[SubmitRequest]) -> SubmitAnswer:
        """Queue all of `messages` or none; ids that are known already change nothing."""
        ...

    async def resume(self, client_id: str, messages: Sequence[SubmitRequest]) -> SubmitAnswer:
        """Introduce this replica to a scheduler that does not know it, with all that it has."""
        ...

    async def end(self, message: EndRequest) -> None:
        """End a request in whatever state it is; unknown ids are no error."""
        ...

    async def poll(self, client_id: str, last_batch: int) -> PollAnswer:
        """The batch after `last_batch`, or after a few seconds an answer without one.

        The answer of a scheduler that does not know the replica has `is_new` set.
        """
        ...

    async def abort(self, ids: Sequence[str]) -> int:
        """End all requests, of whatever replica, whose answer or whose client's own id is among
        `ids`; how many that were."""
        ...

    async def reset_prefix_cache(self) -> None:
        """Forget all cached content. Raises EngineBusyError while requests hold blocks."""
        ...


class EngineClient:
    """All calls are for one event loop. Begin with `start`, end with `close`."""

    def __init__(
        self,
        calls: EngineCalls,
        client_id: str | None = None,
        *,
        max_recovery_seconds: float = 60.0,
        on_close: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`max_recovery_seconds`: how long new requests may wait for an engine that recovers.
        `on_close` is awaited at the end of `close`."""
        self.client_id = client_id or f"ingress-{uuid.uuid4().hex[:12]}"
        """What `SubmitRequest.client_id` must be, so that answers come here."""
        self.metrics = MetricsExchange(calls, self.client_id)
        self._calls = calls
        self._max_recovery_seconds = max_recovery_seconds
        self._on_close = on_close
        self._streams: dict[str, RequestStream] = {}
        self._info = EngineInfo(EngineState.STARTING, "the engine has not been reached yet")
        self._changed = asyncio.Event()
        self._recovering_since_seconds = 0.0
        self._num_schedulers = 0
        """That have been brought what there is."""
        self._leave_reason = ""
        self._last_batch = 0
        self._poller: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[None]] = set()

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    def info(self) -> EngineInfo:
        """The state that came with the last poll, at most a few seconds old. Costs nothing."""
        return self._info.while_draining(self._leave_reason)

    async def wait_ready(self, timeout_seconds: float | None = None) -> EngineInfo:
        """Wait until the engine is ready or has failed, at most `timeout_seconds` (None: on)."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                while self._info.state not in (EngineState.READY, EngineState.FAILED):
                    await self._next_change()
        return self._info

    def start(self) -> None:
        """Begin to poll. Safe to call again."""
        self.metrics.start()
        if self._poller is None:
            self._poller = asyncio.create_task(self._poll_forever(), name="engine-poll")

    async def close(self) -> None:
        """Stop polling. Open streams end with an error."""
        await self.metrics.close()
        tasks = [task for task in (self._poller, *self._background) if task is not None]
        self._poller = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._leave_reason = "the server is shutting down"
        self._fail_streams(self._leave_reason)
        if self._on_close is not None:
            await self._on_close()

    def leave(self, reason: str) -> None:
        """This replica has no more time: end its requests with `reason`, and take no others."""
        self._leave_reason = reason
        for request_id in list(self._streams):
            self._tell_end_soon(EndRequest(request_id, EndReason.ABORT))
        self._fail_streams(reason)

    async def submit(self, messages: Sequence[SubmitRequest]) -> Admission:
        """Queue all of `messages`, or none; `stream` is there for each as soon as it is accepted.

        Waits for an engine that recovers. Raises EngineUnavailableError while the engine takes
        no requests, or recovers for too long.
        """
        self._check_open()
        fresh = [m.request_id for m in messages if m.request_id not in self._streams]
        for message in messages:
            if message.request_id in fresh:
                self._streams[message.request_id] = RequestStream(message)
        accepted = False
        try:
            answer = await self._submit([self._streams[m.request_id] for m in messages])
            accepted = isinstance(answer, Accepted)
        finally:
            for request_id in fresh:
                if accepted and request_id in self._streams:
                    self._streams[request_id].accept()
                elif not accepted:
                    self._streams.pop(request_id, None)
        return answer

    async def _submit(self, streams: Sequence[RequestStream]) -> Admission:
        """The answer of the scheduler there is, or of one of its successors."""
        while True:
            num_schedulers = self._num_schedulers
            try:
                # Tokens that came are an admission whose answer was lost.
                now = time.monotonic()
                answer = await self._calls.submit([stream.message(now) for stream in streams])
            except EngineLostError:
                while num_schedulers == self._num_schedulers:
                    self._check_open()
                    await self._next_change()
                continue
            if isinstance(answer, Unavailable):
                raise EngineUnavailableError(answer.message)
            return answer

    def _check_open(self) -> None:
        """Raises EngineUnavailableError if nothing new can be taken."""
        info = self.info()
        if not info.takes_requests:
            raise EngineUnavailableError(info.reason)
        if info.is_ready:
            return
        recovering_seconds = time.monotonic() - self._recovering_since_seconds
        if recovering_seconds > self._max_recovery_seconds:
            raise EngineUnavailableError(
                f"the engine has been recovering for {recovering_seconds:.0f} s, and requests wait"
                f" at most {self._max_recovery_seconds:g} (server.max_recovery_seconds):"
                f" {info.reason}"
            )

    async def stream(self, request_id: str) -> AsyncIterator[TokenDelta]:
        """The deltas of an accepted request; the last one is terminal. For one reader.

        Leaving early does not end the request: that is what `end` is for. What still comes is
        dropped then. Raises KeyError for a request that is not known, or was read to its end.
        """
        stream = self._streams[request_id]
        try:
            while True:
                delta = await stream.get()
                yield delta
                if delta.finish is not None:
                    return
        finally:
            if self._streams.get(request_id) is stream:
                del self._streams[request_id]

    async def end(self, message: EndRequest) -> None:
        """End a request from outside, also one that may never have been accepted.

        After a STOP its stream still gets the terminal delta; otherwise nobody is there to read
        it, and the stream is forgotten.
        """
        if message.reason is EndReason.STOP:
            stream = self._streams.get(message.request_id)
            if stream is not None:
                stream.end = message
        else:
            self._streams.pop(message.request_id, None)
        await self._tell_end(message)

    async def _tell_end(self, message: EndRequest) -> None:
        # The next scheduler is told again, if it has to know of the request at all.
        with contextlib.suppress(EngineLostError):
            await self._calls.end(message)

    async def abort(self, ids: Sequence[str]) -> int:
        """End requests of any replica, by the ids of their answers or their clients' own ids.

        Their streams get a terminal delta. Returns how many sequences that were.
        """
        try:
            return await self._calls.abort(ids)
        except EngineLostError as error:
            raise EngineUnavailableError(str(error)) from error

    async def reset_prefix_cache(self) -> None:
        """Forget all cached content. Raises EngineBusyError while requests hold blocks."""
        try:
            await self._calls.reset_prefix_cache()
        except EngineLostError as error:
            raise EngineUnavailableError(str(error)) from error

    # -- polling --------------------------------------------------------------------------

    async def _poll_forever(self) -> None:
        while True:
            try:
                answer = await self._calls.poll(self.client_id, self._last_batch)
                self._take(answer)
                if answer.is_new:
                    await self._resume()
            except EngineReplacedError as error:
                self._set_info(EngineInfo(EngineState.DRAINING, str(error)))
                self._fail_streams(str(error))
                await asyncio.sleep(_PAUSE_SECONDS)
            except EngineLostError as error:
                self._lose(str(error))
                await asyncio.sleep(_LOST_PAUSE_SECONDS)
            except Exception:
                # Not known to be lost: without this task no stream would ever move again.
                logger.exception("polling the scheduler failed; trying again")
                await asyncio.sleep(_PAUSE_SECONDS)

    def _take(self, answer: PollAnswer) -> None:
        self._last_batch = answer.number
        now = time.monotonic()
        for batch in answer.batches:
            for delta in batch.deltas:
                stream = self._streams.get(delta.request_id)
                if stream is not None:
                    stream.put(delta, now)
        self._end_stuck_streams(now)
        self._set_info(answer.info)

    def _lose(self, reason: str) -> None:
        """The scheduler is gone, and with it what was under way."""
        self._last_batch = 0
        now = time.monotonic()
        for stream in self._streams.values():
            stream.lost(now)
        if self._info.takes_requests:
            info = msgspec.structs.replace(self._info, state=EngineState.RECOVERING, reason=reason)
            self._set_info(info)

    async def _resume(self) -> None:
        """Bring a scheduler that does not know us what another one had accepted."""
        now = time.monotonic()
        resumed = [s for s in self._streams.values() if s.is_accepted and not s.is_finished]
        messages = sorted((s.message(now) for s in resumed), key=lambda m: m.arrival_seconds)
        for stream in resumed:
            if stream.end is not None:  # before its request, which will end at once
                await self._calls.end(stream.end)
        answer = await self._calls.resume(self.client_id, messages)
        for stream in resumed:
            if isinstance(answer, Accepted):
                stream.resumed()
            else:
                stream.put(_failure(stream.request_id, answer.message), now)
        self._num_schedulers += 1
        self._changed.set()

    def _set_info(self, info: EngineInfo) -> None:
        last = self._info
        if info.state is EngineState.STARTING and last.takes_requests:
            # All of it died; to its clients that is no other case than the death of a part.
            info = msgspec.structs.replace(info, state=EngineState.RECOVERING)
        if info.state is EngineState.RECOVERING and not info.max_model_len:
            # Nobody is there to say how large things are.
            state = EngineState.RECOVERING if last.max_model_len else EngineState.STARTING
            info = msgspec.structs.replace(last, state=state, reason=info.reason)
        if info.state is not last.state:
            logger.info("engine is %s %s", info.state, info.reason)
            if info.state is EngineState.RECOVERING:
                self._recovering_since_seconds = time.monotonic()
        self._info = info
        if info.state is EngineState.FAILED:
            self._fail_streams(info.reason)
        self._changed.set()

    async def _next_change(self) -> None:
        """Returns after some seconds also without one."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PAUSE_SECONDS):
                await self._changed.wait()

    def _end_stuck_streams(self, now: float) -> None:
        """Readers that do not read cost memory here, and blocks in the engine."""
        for request_id, stream in self._streams.items():
            if stream.is_stuck(now):
                stream.end = EndRequest(request_id, EndReason.SLOW_CLIENT)
                self._tell_end_soon(stream.end)

    def _tell_end_soon(self, message: EndRequest) -> None:
        task = asyncio.create_task(self._tell_end(message))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _fail_streams(self, reason: str) -> None:
        now = time.monotonic()
        for request_id, stream in self._streams.items():
            if not stream.is_finished:
                stream.put(_failure(request_id, reason), now)


def _failure(request_id: str, reason: str) -> TokenDelta:
    return TokenDelta(request_id, (), finish=FinishReason.ERROR, error=reason)
