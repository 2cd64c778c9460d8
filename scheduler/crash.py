"""An error in the core: which requests it was about, and who is not let in again.

After it the core is of no more use, so what it was working on is read off the stack. A request
that was there at two crashes would take every successor along, and with it everybody's pause.
"""

import traceback
from collections import Counter, deque
from collections.abc import Collection, Sequence

from scheduler.errors import CoreCrashedError
from scheduler.messages import EndRequest, FinishReason, SubmitRequest, TokenBatch, TokenDelta
from scheduler.request import Request

CRASHES_OF_A_CULPRIT = 2
VERDICT = (
    "the scheduler failed again and again while it worked on this request; its log says how, "
    "and this is a fault of the server's"
)
_NUM_CRASHES = 64

_ABOUT_ONE_REQUEST = (Request, SubmitRequest, EndRequest)


def core_crashed(error: BaseException) -> CoreCrashedError:
    """`error`, which the core raised, as others are told of it: without content."""
    return CoreCrashedError(
        f"the scheduler's core failed with {type(error).__name__}", _requests_at_hand(error)
    )


def _requests_at_hand(error: BaseException) -> tuple[str, ...]:
    """Ids of the requests in the innermost function that had any."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame in reversed(frames):
        values = frame.f_locals.values()
        ids = {value.request_id for value in values if isinstance(value, _ABOUT_ONE_REQUEST)}
        if ids:
            return tuple(sorted(ids))
    return ()


class CrashLog:
    """The crashes of schedulers one after the other; each is noted once."""

    def __init__(self) -> None:
        self._crashes: deque[tuple[str, tuple[str, ...]]] = deque(maxlen=_NUM_CRASHES)

    def note(self, scheduler_id: str, crash: CoreCrashedError) -> None:
        if scheduler_id not in (noted for noted, _ in self._crashes):
            self._crashes.append((scheduler_id, crash.request_ids))

    @property
    def culprits(self) -> frozenset[str]:
        """Requests that no scheduler should be given again."""
        counts = Counter(request_id for _, ids in self._crashes for request_id in ids)
        return frozenset(i for i, count in counts.items() if count >= CRASHES_OF_A_CULPRIT)


def without_culprits(
    messages: Sequence[SubmitRequest], culprits: Collection[str]
) -> tuple[list[SubmitRequest], dict[str, TokenBatch]]:
    """The requests that the core may be given, and for the clients of the others their end."""
    innocent = [m for m in messages if m.request_id not in culprits]
    ends: dict[str, TokenBatch] = {}
    for message in messages:
        if message.request_id in culprits:
            end = TokenDelta(message.request_id, (), finish=FinishReason.ERROR, error=VERDICT)
            told = ends.get(message.client_id, TokenBatch(0, ()))
            ends[message.client_id] = TokenBatch(0, (*told.deltas, end))
    return innocent, ends
