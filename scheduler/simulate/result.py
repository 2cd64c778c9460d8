"""What is seen of a simulation: its timeline, its latencies, and the sums of the core."""

from array import array
from dataclasses import dataclass
from math import nan

import numpy as np
from numpy.typing import NDArray


class Timeline:
    """One row per change, kept in typed columns: 8 bytes per figure."""

    GAUGES = (
        "held_blocks",
        "evictable_blocks",
        "scratch_blocks",
        "running",
        "waiting",
        "preempted",
    )
    """`preempted`: those of the waiting who have run before."""
    COUNTERS = (
        "preemptions",
        "recovered_tokens",
        "recomputed_tokens",
        "queries_tokens",
        "hits_tokens",
        "resume_queries_tokens",
        "resume_hits_tokens",
    )

    def __init__(self) -> None:
        self._seconds = array("d")
        self._columns = {name: array("q") for name in self.GAUGES + self.COUNTERS}
        self._appends = [column.append for column in self._columns.values()]

    def __len__(self) -> int:
        return len(self._seconds)

    @property
    def end_seconds(self) -> float:
        return self._seconds[-1] if self._seconds else 0.0

    def peak(self, gauge: str) -> int:
        return max(self._columns[gauge], default=0)

    def record(self, seconds: float, *row: int) -> None:
        """`row`: the gauges, then the counters so far, in the order of the names above."""
        self._seconds.append(seconds)
        for append, value in zip(self._appends, row, strict=True):
            append(value)

    def binned(self, num_bins: int) -> "BinnedTimeline":
        """Equal bins from time 0 to the last row. Raises ValueError without a row."""
        if not self._seconds:
            raise ValueError("nothing was recorded")
        seconds = np.frombuffer(self._seconds, dtype=np.float64)
        edges = np.linspace(0.0, max(seconds[-1], 1e-9), num_bins + 1)
        means, increments = {}, {}
        for name in self.GAUGES:
            # A gauge holds from its row to the next, so its integral is a polygon: exact means.
            values = np.frombuffer(self._columns[name], dtype=np.int64)
            integral = np.concatenate(([0.0], np.cumsum(values[:-1] * np.diff(seconds))))
            means[name] = np.diff(np.interp(edges, seconds, integral)) / np.diff(edges)
        last_rows = np.searchsorted(seconds, edges[1:], side="right") - 1
        for name in self.COUNTERS:
            totals = np.frombuffer(self._columns[name], dtype=np.int64)[last_rows]
            increments[name] = np.diff(np.where(last_rows < 0, 0, totals), prepend=0)
        return BinnedTimeline(edges, means, increments)


@dataclass(frozen=True, slots=True)
class BinnedTimeline:
    """A timeline of bounded size: bin i is [edges[i], edges[i + 1]) seconds."""

    edges_seconds: NDArray[np.float64]
    means: dict[str, NDArray[np.float64]]
    """Time-weighted mean of each gauge, per bin."""
    increments: dict[str, NDArray[np.int64]]
    """What each counter grew by, per bin."""


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Of a latency; NaN where nothing was measured."""

    p50_seconds: float
    p99_seconds: float

    @classmethod
    def of(cls, samples: "array[float]") -> "Quantiles":
        if not samples:
            return cls(nan, nan)
        p50, p99 = np.percentile(np.frombuffer(samples, dtype=samples.typecode), (50, 99))
        return cls(float(p50), float(p99))


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """What one pool size did to one workload. Token and block figures are sums over the run."""

    num_blocks: int
    block_size: int
    requests: int
    finished: int
    cut_short: int
    """Finished with fewer output tokens than were recorded: at the context length."""
    refused: dict[str, int]
    """By the name of the answer."""
    steps: int
    simulated_seconds: float
    """From the first arrival to the last token."""
    output_tokens: int
    """Received by those who sent the requests."""
    scheduled_tokens: dict[str, int]
    """Computed, by kind: prompt, output, recompute."""
    time_to_first_token: Quantiles
    inter_token_latency: Quantiles
    queries_tokens: int
    hits_tokens: int
    resume_queries_tokens: int
    resume_hits_tokens: int
    preemptions: dict[str, int]
    held_tokens: int
    recovered_tokens: int
    recomputed_tokens: int
    dropped_tokens: int
    evictions: int
    peak_running: int
    peak_waiting: int
    peak_held_blocks: int
    peak_demand_blocks: int
    """The pool in which nobody would have been preempted, as the core saw the load; 0 if
    nobody was."""
    timeline: Timeline

    @property
    def hit_ratio(self) -> float:
        return _ratio(self.hits_tokens, self.queries_tokens)

    @property
    def resume_hit_ratio(self) -> float:
        return _ratio(self.resume_hits_tokens, self.resume_queries_tokens)

    @property
    def recompute_tax(self) -> float:
        """Share of all scheduled tokens that had been computed before."""
        return _ratio(self.scheduled_tokens["recompute"], sum(self.scheduled_tokens.values()))


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else nan
