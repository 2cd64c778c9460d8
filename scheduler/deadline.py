"""How long a step may take before its workers count as lost."""

from collections import deque
from statistics import median

_NUM_SAMPLES = 64
_TIMES_THE_MEDIAN = 20.0


class StepDeadline:
    """Watches the oldest step in flight of one epoch.

    It may take `least_seconds`, or 20 times what its tokens took in the median of the last 64
    steps if that is longer. The first one may take `first_seconds`: workers compile and capture
    in it.
    Times are in seconds, from any clock that does not go back.
    """

    def __init__(self, least_seconds: float, *, first_seconds: float) -> None:
        self._least_seconds = least_seconds
        self._first_seconds = first_seconds
        self._in_flight: deque[tuple[float, int]] = deque()
        self._oldest_since_seconds = 0.0
        self._seconds_per_token: deque[float] = deque(maxlen=_NUM_SAMPLES)
        self._answered_any = False

    def published(self, num_tokens: int, now: float) -> None:
        if not self._in_flight:
            self._oldest_since_seconds = now
        self._in_flight.append((now, num_tokens))

    def answered(self, now: float) -> None:
        _, num_tokens = self._in_flight.popleft()
        if num_tokens and self._answered_any:
            self._seconds_per_token.append((now - self._oldest_since_seconds) / num_tokens)
        self._answered_any = True
        self._oldest_since_seconds = now

    def overdue_seconds(self, now: float) -> float | None:
        """How long the oldest step has taken, if that is too long."""
        if not self._in_flight:
            return None
        _, num_tokens = self._in_flight[0]
        limit_seconds = self._least_seconds if self._answered_any else self._first_seconds
        if self._seconds_per_token:
            usual_seconds = num_tokens * median(self._seconds_per_token)
            limit_seconds = max(limit_seconds, _TIMES_THE_MEDIAN * usual_seconds)
        waited_seconds = now - self._oldest_since_seconds
        return waited_seconds if waited_seconds > limit_seconds else None
