"""What an engine counts of its faults: one more source of the sum that `/metrics` tells."""

import uuid
from collections.abc import Sequence

from scheduler.histogram import Histogram
from scheduler.messages import Counts, Tally
from scheduler.metrics import frozen
from scheduler.metrics_desk import ENGINE_PREFIX
from scheduler.tally import EMPTY


class FaultCounts:
    def __init__(self) -> None:
        self._source = f"{ENGINE_PREFIX}{uuid.uuid4().hex[:12]}"
        self._version = 0
        self.num_restarts = 0
        """Processes that took the place of another."""
        self._num_worker_restarts = 0
        self._recovery_seconds = Histogram.of_seconds()

    def restarted(self, processes: Sequence[str]) -> None:
        """These, as in `Recovery.replaced`."""
        self.num_restarts += len(processes)
        self._num_worker_restarts += sum(name.startswith("worker") for name in processes)

    def recovered(self, seconds: float) -> None:
        """It took so long from the notice to the next group."""
        self._recovery_seconds.observe(seconds)

    def report(self) -> Tally:
        """For `SchedulerActor.exchange_counts`."""
        self._version += 1
        counts = Counts(
            self._version,
            {"worker_restarts_total": {"": self._num_worker_restarts}},
            {"recovery_seconds": {"": frozen(self._recovery_seconds)}},
        )
        return Tally({self._source: counts}, EMPTY.retired, ())
