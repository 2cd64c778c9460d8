"""One API request under way: its sequences at the engine, and their pieces of text, merged.

prompts x n ──► sequences ──submit──► engine
                                        │ deltas, one stream per sequence
pieces ◄── queue ◄── one task per sequence: tokens to text, stop texts
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Sequence

from cluster.api_errors import (
    ApiError,
    InternalError,
    InvalidRequestError,
    TooManyRequestsError,
    UnavailableError,
)
from cluster.choice import Choice, Piece
from cluster.engine_client import EngineClient
from cluster.errors import EngineUnavailableError
from cluster.metrics_counts import ABORT, ERROR, SequenceCounts
from cluster.queue_share import Place
from scheduler.messages import (
    TOKEN_BYTES,
    Accepted,
    Admission,
    BadRequest,
    EndReason,
    EndRequest,
    EngineInfo,
    EngineState,
    NeverFits,
    QueueFull,
    SubmitRequest,
)

_MAX_RETRY_SECONDS = 60.0
_REFUSALS = {BadRequest: "bad_request", NeverFits: "never_fits", QueueFull: "queue_full"}
UNAVAILABLE_RETRY_SECONDS = 5.0
_MAX_UNREAD_PIECES = 1024


# A task that nobody holds may be collected before it is done.
_ENDING: set[asyncio.Task[None]] = set()


class Generation:
    """Begin with `start`, read `pieces`, and call `end` in any case: it frees what is held."""

    def __init__(
        self,
        engine: EngineClient,
        messages: Sequence[SubmitRequest],
        choices: Sequence[Choice],
        *,
        max_queue_seconds: float,
        arrived_seconds: float,
        num_choices_per_prompt: int,
    ) -> None:
        """One choice for each message, under the same request id; those of one prompt side by
        side. `arrived_seconds` is when the request came, on `time.monotonic`."""
        self._engine = engine
        self._messages = messages
        self._choices = choices
        self._max_queue_seconds = max_queue_seconds
        self._arrived_seconds = arrived_seconds
        self._num_choices_per_prompt = num_choices_per_prompt
        self.place: Place | None = None
        """In the share that its API key has of the queue; left with the first token."""
        # Full, it keeps deltas at the engine client, which ends who does not read.
        self._queue: asyncio.Queue[Piece | Exception] = asyncio.Queue(_MAX_UNREAD_PIECES)
        self._readers: list[asyncio.Task[None]] = []
        self._live: set[str] = set()
        """Request ids that the engine may still be working on."""
        self._books: dict[str, SequenceCounts] = {}
        """Of all sequences that the engine has accepted."""
        self._outcome = ABORT
        """What the books say of those that `end` ends."""

    @property
    def num_prompt_tokens(self) -> tuple[int, ...]:
        """Per choice."""
        return tuple(len(message.prompt_token_ids) // TOKEN_BYTES for message in self._messages)

    async def start(self) -> None:
        """Queue all sequences at the engine, or none. Raises ApiError."""
        self._live = {message.request_id for message in self._messages}
        try:
            admission = await self._engine.submit(self._messages)
        except EngineUnavailableError as error:
            # It may have been accepted, and the answer lost: `end` will tell.
            self._engine.metrics.counts.refused("unavailable")
            raise UnavailableError(
                str(error), retry_after_seconds=UNAVAILABLE_RETRY_SECONDS
            ) from error
        if not isinstance(admission, Accepted):
            self._live.clear()
            self._engine.metrics.counts.refused(_REFUSALS[type(admission)])
            raise refusal(admission, self._engine.info())
        self._open_books()
        self._readers = [
            asyncio.create_task(self._read(choice), name=f"read-{choice.request_id}")
            for choice in self._choices
        ]

    async def pieces(self, idle_seconds: float) -> AsyncIterator[list[Piece]]:
        """What has come, in the order of its coming, until each choice has had its last piece.

        Empty lists say that nothing came for `idle_seconds`. Raises ApiError when the engine
        fails one of the sequences, or has not begun with any of them in time.
        """
        deadline_seconds = time.monotonic() + self._max_queue_seconds
        has_begun = False
        num_open = len(self._choices)
        while num_open:
            try:
                async with asyncio.timeout(idle_seconds):
                    pieces = [await self._next_piece()]
            except TimeoutError:
                if not has_begun and time.monotonic() > deadline_seconds:
                    raise UnavailableError(
                        f"The request waited for {self._max_queue_seconds:g} seconds, which is"
                        " the limit (server.max_queue_seconds); try again later.",
                        retry_after_seconds=retry_seconds(self._engine.info()),
                    ) from None
                yield []
                continue
            while not self._queue.empty():
                pieces.append(await self._next_piece())
            has_begun = True
            self._leave_queue()
            num_open -= sum(piece.finish is not None for piece in pieces)
            yield pieces

    def fail(self) -> None:
        """The client is told of an error: what ends from now on has not been left by it."""
        self._outcome = ERROR

    def end(self, reason: EndReason = EndReason.ABORT) -> None:
        """End whatever has not ended by itself. Safe to call again.

        Does not wait: a request may be cancelled more than once, for its client and by the server,
        and the second time must not catch the first in the middle.
        """
        self._leave_queue()
        for reader in self._readers:
            reader.cancel()
        now = time.monotonic()
        for request_id in self._live:
            if request_id in self._books:
                self._books[request_id].ended(self._outcome, now)
            ending = asyncio.create_task(self._engine.end(EndRequest(request_id, reason)))
            _ENDING.add(ending)
            ending.add_done_callback(_ENDING.discard)
        self._live.clear()

    def _open_books(self) -> None:
        counts, num_prompt_tokens = self._engine.metrics.counts, self.num_prompt_tokens
        counts.accepted(sum(num_prompt_tokens[:: self._num_choices_per_prompt]))
        self._books = {
            message.request_id: SequenceCounts(counts, num_tokens, self._arrived_seconds)
            for message, num_tokens in zip(self._messages, num_prompt_tokens, strict=True)
        }

    def _leave_queue(self) -> None:
        if self.place is not None:
            self.place.leave()

    async def _next_piece(self) -> Piece:
        """Raises ApiError for a piece that is an error."""
        piece = await self._queue.get()
        if isinstance(piece, Exception):
            raise piece
        if piece.error is None:
            return piece
        if self._engine.info().state is EngineState.DRAINING:
            raise UnavailableError(
                f"The request was ended: {piece.error}.",
                retry_after_seconds=UNAVAILABLE_RETRY_SECONDS,
            )
        raise InternalError(f"The engine could not go on with this request: {piece.error}.")

    async def _read(self, choice: Choice) -> None:
        books = self._books[choice.request_id]
        try:
            async for delta in self._engine.stream(choice.request_id):
                was_stopped = choice.is_stopped
                piece = choice.read(delta)
                now = time.monotonic()
                books.has_output(piece.num_output_tokens, now)
                await self._queue.put(piece)
                if delta.finish is not None:
                    books.ended(piece.finish or ERROR, now)
                    self._live.discard(choice.request_id)
                elif choice.is_stopped and not was_stopped:
                    await self._engine.end(
                        EndRequest(choice.request_id, EndReason.STOP, choice.num_output_tokens)
                    )
        except Exception as error:
            await self._queue.put(error)


def refusal(admission: Admission, info: EngineInfo) -> ApiError:
    """The error that stands for an admission that is none."""
    match admission:
        case BadRequest():
            too_long = admission.param == "prompt" and "context length" in admission.message
            return InvalidRequestError(
                _sentence(admission.message),
                param=admission.param,
                code="context_length_exceeded" if too_long else None,
            )
        case NeverFits():
            return InvalidRequestError(
                _sentence(admission.message), param="prompt", code="kv_cache_exceeded"
            )
        case QueueFull():
            return TooManyRequestsError(
                _sentence(admission.message),
                code="queue_full",
                retry_after_seconds=retry_seconds(info),
            )
    raise TypeError(f"{admission} is no refusal")


def retry_seconds(info: EngineInfo) -> float:
    """How long the engine needs, at its present rate, for the tokens that wait already."""
    if info.tokens_per_second <= 0:
        return 1.0
    seconds = math.ceil(info.waiting_tokens / info.tokens_per_second)
    return min(max(1.0, seconds), _MAX_RETRY_SECONDS)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."
