"""One request as its ingress replica keeps it: unread deltas, and all it takes to go on with it."""

import asyncio
import time
from array import array
from collections import deque

import msgspec

from scheduler.messages import (
    TOKEN_BYTES,
    EndRequest,
    InterruptionCause,
    Interruptions,
    SubmitRequest,
    TokenDelta,
    Usage,
)

MAX_UNREAD_BYTES = 4 << 20
MAX_UNREAD_SECONDS = 60.0

# What a delta holds in memory, roughly: itself, one token, one alternative of a token.
_DELTA_BYTES, _TOKEN_BYTES, _ALTERNATIVE_BYTES = 200, 40, 120


class RequestStream:
    """Deltas in, from whichever scheduler has the request; deltas out, to one reader.

    Times are in seconds, from `time.monotonic`.
    """

    __slots__ = (
        "_deltas",
        "_lost_since_seconds",
        "_message",
        "_num_bytes",
        "_num_losses",
        "_output_token_ids",
        "_unread_bytes",
        "_unread_since_seconds",
        "_usage",
        "end",
        "is_finished",
    )

    def __init__(self, message: SubmitRequest) -> None:
        self._message = message
        self._output_token_ids = array("i")
        self._usage: Usage | None = None
        """The last one that was told; None: not known to have been accepted."""
        self._num_losses = 0
        self._lost_since_seconds: float | None = None
        """Schedulers lost since that usage, and when the first of them was."""
        self.end: EndRequest | None = None
        """Was sent, and is not answered yet."""
        self.is_finished = False
        self._deltas: asyncio.Queue[TokenDelta] = asyncio.Queue()
        self._num_bytes: deque[int] = deque()
        """Of each unread delta."""
        self._unread_bytes = 0
        self._unread_since_seconds = 0.0

    # -- from the scheduler ---------------------------------------------------------------

    @property
    def request_id(self) -> str:
        return self._message.request_id

    @property
    def is_accepted(self) -> bool:
        return self._usage is not None

    def accept(self) -> None:
        if self._usage is None:
            self._usage = Usage(len(self._message.prompt_token_ids) // TOKEN_BYTES, 0, 0)

    def put(self, delta: TokenDelta, now: float) -> None:
        self.accept()
        self._output_token_ids.extend(delta.token_ids)
        if delta.usage is not None:
            self._usage = delta.usage
            self._num_losses, self._lost_since_seconds = 0, None
        self.is_finished = delta.finish is not None
        if self._deltas.empty():
            self._unread_since_seconds = now
        self._num_bytes.append(_num_bytes(delta))
        self._unread_bytes += self._num_bytes[-1]
        self._deltas.put_nowait(delta)

    # -- to the scheduler -----------------------------------------------------------------

    def lost(self, now: float) -> None:
        """Its scheduler is gone."""
        if self._lost_since_seconds is None:
            self._lost_since_seconds = now

    def resumed(self) -> None:
        """Another scheduler has it now, and will count this in the next usage."""
        self._num_losses += 1

    def message(self, now: float) -> SubmitRequest:
        """What to submit: the request, or once it was accepted its continuation."""
        if self._usage is None:
            return self._message
        return msgspec.structs.replace(
            self._message,
            output_token_ids=self._output_token_ids.tobytes(),
            usage_so_far=msgspec.structs.replace(
                self._usage, interruptions=self._interruptions(now)
            ),
        )

    def _interruptions(self, now: float) -> Interruptions | None:
        """With the losses that no scheduler has lived to tell, and with the time until now."""
        assert self._usage is not None, "only of what was accepted"
        told = self._usage.interruptions
        if self._lost_since_seconds is None:
            return told
        told = told or Interruptions({})
        causes = dict(told.causes)
        if self._num_losses:
            lost = InterruptionCause.SCHEDULER_LOST
            causes[lost] = causes.get(lost, 0) + self._num_losses
        stalled_seconds = told.stalled_seconds + now - self._lost_since_seconds
        return msgspec.structs.replace(told, causes=causes, stalled_seconds=stalled_seconds)

    # -- to the reader --------------------------------------------------------------------

    async def get(self) -> TokenDelta:
        delta = await self._deltas.get()
        self._unread_bytes -= self._num_bytes.popleft()
        self._unread_since_seconds = time.monotonic()
        return delta

    def is_stuck(self, now: float) -> bool:
        """Its reader does not read, and it has not been ended for that yet.

        The oldest delta does not count: it may be large by itself (the ratings of a long prompt
        come at once), and its reader has had no chance before it came.
        """
        if not self._num_bytes or self.end is not None:
            return False
        waited_seconds = now - self._unread_since_seconds
        behind_bytes = self._unread_bytes - self._num_bytes[0]
        return behind_bytes > MAX_UNREAD_BYTES or waited_seconds > MAX_UNREAD_SECONDS


def _num_bytes(delta: TokenDelta) -> int:
    num_alternatives = sum(1 + len(row.top) for row in delta.logprobs)
    num_alternatives += sum(1 + len(row.top) for row in delta.prompt_logprobs)
    return (
        _DELTA_BYTES + _TOKEN_BYTES * len(delta.token_ids) + _ALTERNATIVE_BYTES * num_alternatives
    )
