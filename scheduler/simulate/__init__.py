"""The real scheduler core, driven by a virtual clock over a recorded workload.

Everything the core decides is real: admission, prefix hits, evictions, preemptions. Only the
workers are made up: a step takes the time that `StepCosts` gives it, and a sampled token is a
function of request and position. A simulation is therefore exactly repeatable, and what its
times are worth is what the two cost figures are worth.
"""

from scheduler.simulate.loop import AllRefusedError, StepCosts, simulate
from scheduler.simulate.result import BinnedTimeline, Quantiles, SimulationResult, Timeline
from scheduler.simulate.workload import MAX_PREFIX_IDS, TOKENS_PER_PREFIX_ID, TraceRequest

__all__ = [
    "MAX_PREFIX_IDS",
    "TOKENS_PER_PREFIX_ID",
    "AllRefusedError",
    "BinnedTimeline",
    "Quantiles",
    "SimulationResult",
    "StepCosts",
    "Timeline",
    "TraceRequest",
    "simulate",
]
