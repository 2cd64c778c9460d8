"""Where the counts of all processes meet: the scheduler's own, and those of ingress replicas."""

import uuid
from collections.abc import Callable, Container
from dataclasses import dataclass

from scheduler.core import SchedulerCore
from scheduler.messages import Counts, Gauges, Tally, TallyAnswer
from scheduler.metrics import counts_of, gauges_of
from scheduler.step_loop import StepLoop
from scheduler.tally import EMPTY, merged, retire

ENGINE_PREFIX = "engine-"
"""Of the sources that are engines: they report at every fault, which may be in a year."""
_MAX_SOURCES = 64
"""More than that, and those that are long gone become one."""
_GONE_SECONDS = 600.0
"""Far beyond the time in which a replica that is alive finds a new scheduler and reports."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The scheduler's own part, at one moment."""

    counts: Counts
    gauges: Gauges


class MetricsDesk:
    def __init__(self) -> None:
        self._name = f"scheduler-{uuid.uuid4().hex[:12]}"
        self._tally = EMPTY
        self._version = 0
        self._missed_since_seconds: dict[str, float] = {}

    def take(self, report: Tally) -> None:
        """What a replica knows. It may come twice, or late."""
        self._tally = merged(self._tally, report)

    def measure_of(self, loop: StepLoop) -> Callable[[SchedulerCore, float], Measured]:
        """A call for `loop`, which alone may look at the core."""

        def measure(core: SchedulerCore, now: float) -> Measured:
            self._version += 1
            return Measured(
                counts_of(core.accounting, loop.step_seconds, self._version), gauges_of(core, now)
            )

        return measure

    def answer(self, measured: Measured | None) -> TallyAnswer:
        """What everybody counted. Without `measured` it holds what the scheduler last had."""
        if measured is None:
            return TallyAnswer(self._tally, None)
        own = Tally({self._name: measured.counts}, EMPTY.retired, ())
        self._tally = merged(self._tally, own)
        return TallyAnswer(self._tally, measured.gauges)

    def forget_all_but(self, clients: Container[str], now: float) -> None:
        """Fold the counts of replicas that have been gone for long, so that their number does not
        grow for ever. Nothing is lost of the sum."""
        missed = self._missed_since_seconds
        for name in self._tally.sources:
            if name == self._name or name in clients or name.startswith(ENGINE_PREFIX):
                missed.pop(name, None)
            else:
                missed.setdefault(name, now)
        if len(self._tally.sources) > _MAX_SOURCES:
            gone = [name for name, since in missed.items() if now - since > _GONE_SECONDS]
            self._tally = retire(self._tally, gone)
            for name in gone:
                del missed[name]
