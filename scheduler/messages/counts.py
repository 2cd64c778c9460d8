"""What is counted, between ingress and scheduler."""

from scheduler.messages.base import Message


class HistogramCounts(Message, frozen=True):
    """Of a histogram with fixed bounds: how many values each bucket has, and their sum."""

    bucket_counts: tuple[int, ...]
    sum: float


class Counts(Message, frozen=True):
    """What one process has counted since it began. No number in it ever falls.

    By metric, and within it by the value of the metric's label, which is "" without one.
    """

    version: int
    """Rises with each copy that the process gives away: of two copies the higher one holds."""
    counters: dict[str, dict[str, int]]
    histograms: dict[str, dict[str, HistogramCounts]]


class Tally(Message, frozen=True):
    """What all processes have counted, kept apart so that nothing is added twice."""

    sources: dict[str, Counts]
    retired: Counts
    """The sum of processes that have long been gone, whose ids are `retired_ids`."""
    retired_ids: tuple[str, ...]


class Gauges(Message, frozen=True):
    """How full things are at this moment."""

    running_requests: int
    waiting_new_requests: int
    waiting_preempted_requests: int
    held_blocks: int
    evictable_blocks: int
    scratch_blocks: int
    wanted_blocks: int
    """The pool, with the null block, that would have avoided the preemptions of the last five
    minutes; 0: there were none."""
    epoch: int


class TallyAnswer(Message, frozen=True):
    tally: Tally
    gauges: Gauges | None
    """None: there are no workers."""
