"""A picture of the scheduler for people and tests: plain numbers, no content."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import quantiles

from scheduler.core import SchedulerCore
from scheduler.messages import EngineInfo
from scheduler.step_loop import StepTiming


@dataclass(frozen=True, slots=True)
class Spread:
    """A few quantiles of recent steps, in milliseconds."""

    median_ms: float
    p99_ms: float

    @classmethod
    def of_seconds(cls, seconds: Iterable[float]) -> "Spread | None":
        """None for less than two values."""
        values = list(seconds)
        if len(values) < 2:
            return None
        cuts = quantiles(values, n=100, method="inclusive")
        return cls(round(1e3 * cuts[49], 3), round(1e3 * cuts[98], 3))


@dataclass(frozen=True, slots=True)
class Timings:
    """Of the last 4,096 steps. None before there were two."""

    gap: Spread | None = None
    """In the worker, from the end of one step to the start of the next."""
    execute: Spread | None = None
    apply: Spread | None = None
    plan: Spread | None = None

    @classmethod
    def of(cls, timings: Sequence[StepTiming]) -> "Timings":
        return cls(
            gap=Spread.of_seconds(t.gap_seconds for t in timings),
            execute=Spread.of_seconds(t.execute_seconds for t in timings),
            apply=Spread.of_seconds(t.apply_seconds for t in timings),
            plan=Spread.of_seconds(t.plan_seconds for t in timings),
        )


@dataclass(frozen=True, slots=True)
class Counters:
    """What the core has counted since it began. Tokens where the name says so."""

    next_step_id: int
    steps_in_flight: int
    open_requests: int
    held_blocks: int
    evictable_blocks: int
    scratch_blocks: int
    queries_tokens: int
    hits_tokens: int
    scheduled_prompt_tokens: int
    scheduled_output_tokens: int
    scheduled_recompute_tokens: int
    preemptions: dict[str, int]
    finished: dict[str, int]
    rejected: dict[str, int]

    @classmethod
    def of(cls, core: SchedulerCore) -> "Counters":
        pool, window, accounting = core.group.pool, core.group.window, core.accounting
        scheduled = accounting.scheduled_tokens
        return cls(
            next_step_id=window.next_step_id,
            steps_in_flight=window.num_in_flight,
            open_requests=len(core.requests),
            held_blocks=pool.num_held,
            evictable_blocks=pool.num_usable - pool.num_held - pool.num_scratch,
            scratch_blocks=pool.num_scratch,
            queries_tokens=accounting.queries_tokens,
            hits_tokens=accounting.hits_tokens,
            scheduled_prompt_tokens=scheduled.prompt,
            scheduled_output_tokens=scheduled.output,
            scheduled_recompute_tokens=scheduled.recompute,
            preemptions={str(c): t.preemptions for c, t in accounting.by_cause.items()},
            finished={str(reason): n for reason, n in accounting.finished.items()},
            rejected=dict(accounting.rejected),
        )


@dataclass(frozen=True, slots=True)
class SchedulerStatus:
    info: EngineInfo
    counters: Counters | None = None
    """None while no group has formed, and after it was lost."""
    timings: Timings = field(default_factory=Timings)
