"""When an engine that keeps dying is given up. Pure: time comes in with the events."""

from collections import deque

MAX_DEATHS = 5
WINDOW_SECONDS = 300.0
_MAX_PAUSE_SECONDS = 10.0


class DeathLog:
    """The deaths of one engine since it last got on. Times are in seconds."""

    def __init__(self) -> None:
        self._deaths: deque[float] = deque()

    def died(self, now: float, *, after_progress: bool) -> None:
        """A group was lost, or could not be formed. `after_progress`: it had finished a step, or
        this death has proved which request kills the workers."""
        if after_progress:
            self._deaths.clear()
        self._deaths.append(now)
        while self._deaths[0] < now - WINDOW_SECONDS:
            self._deaths.popleft()

    @property
    def is_hopeless(self) -> bool:
        """So many deaths in a row, within the window, that another attempt is not worth it."""
        return len(self._deaths) >= MAX_DEATHS

    @property
    def pause_seconds(self) -> float:
        """How long to wait before the next attempt: not at all after a first death."""
        num_in_a_row = len(self._deaths)
        return min(_MAX_PAUSE_SECONDS, 2.0 ** (num_in_a_row - 2)) if num_in_a_row > 1 else 0.0
