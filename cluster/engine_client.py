"""One ingress replica's line to the engine: requests out, a stream of deltas per request back.

handlers ──submit, end──► EngineClient ──EngineCalls──► scheduler
    ▲                          │
    └── one bounded stream ◄───┴── one outstanding poll for the whole replica
         per request
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Protocol

from cluster.errors import EngineLostError, EngineUnavailableError
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

MAX_UNREAD_BYTES = 4 << 20
MAX_UNREAD_SECONDS = 60.0
_PAUSE_SECONDS = 0.5

# What a delta holds in memory, roughly: itself, one token, one alternative of a token.
_DELTA_BYTES, _TOKEN_BYTES, _ALTERNATIVE_BYTES = 200, 40, 120


class EngineCalls(Protocol):
    """How the engine is reached: over Ray, or in the same process.

    Every call raises EngineLostError when the scheduler it would go to is gone. After that the
    next poll begins with a new one, at batch 0.
    """

    async def submit(self, messages: Sequence[SubmitRequest]) -> SubmitAnswer:
        """Queue all of `messages` or none; ids that are known already change nothing."""
        ...

    async def end(self, message: EndRequest) -> None:
        """End a request in whatever state it is; unknown ids are no error."""
        ...

    async def poll(self, client_id: str, last_batch: int) -> PollAnswer:
        """The batch after `last_batch`, or after a few seconds an answer without one."""
        ...

    async def abort(self, ids: Sequence[str]) -> int:
        """End all requests, of whatever replica, whose answer or whose client's own id is among
        `ids`; how many that were."""
        ...

    async def reset_prefix_cache(self) -> None:
        """Forget all cached content. Raises EngineBusyError while requests hold blocks."""
        ...


class _Stream:
    """Deltas of one request that nobody has read yet."""

    __slots__ = ("_num_bytes", "_unread_bytes", "deltas", "is_ending", "unread_since_seconds")

    def __init__(self) -> None:
        self.deltas: asyncio.Queue[TokenDelta] = asyncio.Queue()
        self._num_bytes: deque[int] = deque()
        """Of each unread delta."""
        self._unread_bytes = 0
        self.unread_since_seconds = 0.0
        self.is_ending = False
        """Its reader is too slow, and the scheduler has been told."""

    def put(self, delta: TokenDelta, now: float) -> None:
        if self.deltas.empty():
            self.unread_since_seconds = now
        self._num_bytes.append(_num_bytes(delta))
        self._unread_bytes += self._num_bytes[-1]
        self.deltas.put_nowait(delta)

    async def get(self) -> TokenDelta:
        delta = await self.deltas.get()
        self._unread_bytes -= self._num_bytes.popleft()
        self.unread_since_seconds = time.monotonic()
        return delta

    def is_stuck(self, now: float) -> bool:
        """The oldest delta does not count: it may be large by itself (the ratings of a long
        prompt come at once), and its reader has had no chance before it came."""
        if not self._num_bytes or self.is_ending:
            return False
        waited_seconds = now - self.unread_since_seconds
        behind_bytes = self._unread_bytes - self._num_bytes[0]
        return behind_bytes > MAX_UNREAD_BYTES or waited_seconds > MAX_UNREAD_SECONDS


class EngineClient:
    """All calls are for one event loop. Begin with `start`, end with `close`."""

    def __init__(
        self,
        calls: EngineCalls,
        client_id: str | None = None,
        *,
        on_close: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`on_close` is awaited at the end of `close`."""
        self.client_id = client_id or f"ingress-{uuid.uuid4().hex[:12]}"
        """What `SubmitRequest.client_id` must be, so that answers come here."""
        self._calls = calls
        self._on_close = on_close
        self._streams: dict[str, _Stream] = {}
        self._info = EngineInfo(EngineState.STARTING, "the engine has not been reached yet")
        self._info_changed = asyncio.Event()
        self._last_batch = 0
        self._poller: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[None]] = set()

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    def info(self) -> EngineInfo:
        """The state that came with the last poll, at most a few seconds old. Costs nothing."""
        return self._info

    async def wait_ready(self, timeout_seconds: float) -> EngineInfo:
        """Wait until the engine is ready or has failed, at most `timeout_seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                while self._info.state not in (EngineState.READY, EngineState.FAILED):
                    self._info_changed.clear()
                    await self._info_changed.wait()
        return self._info

    def start(self) -> None:
        """Begin to poll. Safe to call again."""
        if self._poller is None:
            self._poller = asyncio.create_task(self._poll_forever(), name="engine-poll")

    async def close(self) -> None:
        """Stop polling. Open streams end with an error."""
        tasks = [task for task in (self._poller, *self._background) if task is not None]
        self._poller = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._fail_streams("the server is shutting down")
        if self._on_close is not None:
            await self._on_close()

    async def submit(self, messages: Sequence[SubmitRequest]) -> Admission:
        """Queue all of `messages`, or none; `stream` is there for each as soon as it is accepted.

        Raises EngineUnavailableError while the engine takes no requests.
        """
        if not self._info.is_ready:
            raise EngineUnavailableError(self._info.reason)
        fresh = [m.request_id for m in messages if m.request_id not in self._streams]
        for request_id in fresh:
            self._streams[request_id] = _Stream()
        accepted = False
        try:
            answer = await self._calls.submit(messages)
            if isinstance(answer, Unavailable):
                raise EngineUnavailableError(answer.message)
            accepted = isinstance(answer, Accepted)
        except EngineLostError as error:
            raise EngineUnavailableError(str(error)) from error
        finally:
            if not accepted:
                for request_id in fresh:
                    self._streams.pop(request_id, None)
        return answer

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
        if message.reason is not EndReason.STOP:
            self._streams.pop(message.request_id, None)
        await self._tell_end(message)

    async def _tell_end(self, message: EndRequest) -> None:
        # A lost scheduler has ended it already, in its own way.
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

    async def _poll_forever(self) -> None:
        while True:
            try:
                answer = await self._calls.poll(self.client_id, self._last_batch)
            except EngineLostError as error:
                self._last_batch = 0
                self._set_info(EngineInfo(EngineState.STARTING, str(error)))
                self._fail_streams(str(error))
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            except Exception:
                # Not known to be lost: without this task no stream would ever move again.
                logger.exception("polling the scheduler failed; trying again")
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            self._last_batch = answer.number
            self._set_info(answer.info)
            now = time.monotonic()
            for batch in answer.batches:
                for delta in batch.deltas:
                    stream = self._streams.get(delta.request_id)
                    if stream is not None:
                        stream.put(delta, now)
            self._end_stuck_streams(now)

    def _set_info(self, info: EngineInfo) -> None:
        if info.state is not self._info.state:
            logger.info("engine is %s %s", info.state, info.reason)
        self._info = info
        self._info_changed.set()

    def _end_stuck_streams(self, now: float) -> None:
        """Readers that do not read cost memory here, and blocks in the engine."""
        for request_id, stream in self._streams.items():
            if stream.is_stuck(now):
                stream.is_ending = True
                slow = EndRequest(request_id, EndReason.SLOW_CLIENT)
                task = asyncio.create_task(self._tell_end(slow))
                self._background.add(task)
                task.add_done_callback(self._background.discard)

    def _fail_streams(self, reason: str) -> None:
        now = time.monotonic()
        for request_id, stream in self._streams.items():
            stream.put(TokenDelta(request_id, (), finish=FinishReason.ERROR, error=reason), now)


def _num_bytes(delta: TokenDelta) -> int:
    num_alternatives = sum(1 + len(row.top) for row in delta.logprobs)
    num_alternatives += sum(1 + len(row.top) for row in delta.prompt_logprobs)
    return (
        _DELTA_BYTES + _TOKEN_BYTES * len(delta.token_ids) + _ALTERNATIVE_BYTES * num_alternatives
    )
