"""What the clients of a chaos run saw, as a table and as JSON."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from cluster.bench_client import Outcome
from cluster.chaos_run import ChaosRecord, Seen

_AFTERMATH_SECONDS = 1.0
"""After a recovery a pause that it caused may still last so long."""


@dataclass(frozen=True, slots=True)
class StrikeReport:
    """Seconds count from the strike, but for `at_seconds`, which does from the beginning."""

    strike: str
    at_seconds: float
    noticed_seconds: float | None
    recovered_seconds: float | None
    replaced: tuple[str, ...]
    longest_pause_seconds: float
    """Of any stream around it."""


@dataclass(frozen=True, slots=True)
class ChaosReport:
    completed: int
    failed: int
    differing: int
    """Completed, with another text than without strikes."""
    interrupted: int
    """Completed, after the engine had to begin with them again."""
    duration_seconds: float
    longest_pause_seconds: float
    """Between two pieces of a stream."""
    longest_first_token_seconds: float
    undisturbed_longest_pause_seconds: float
    undisturbed_longest_first_token_seconds: float
    strikes: list[StrikeReport]
    errors: dict[str, int]

    @property
    def is_clean(self) -> bool:
        """No client could have told it from an undisturbed run, but by the pauses."""
        return not self.failed and not self.differing

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def summarize(record: ChaosRecord) -> ChaosReport:
    good = [(number, outcome) for number, outcome in record.asked if outcome.error is None]
    outcomes = [outcome for _, outcome in record.asked]
    expected = [outcome.text for outcome in record.undisturbed]
    return ChaosReport(
        completed=len(good),
        failed=len(outcomes) - len(good),
        differing=sum(outcome.text != expected[number] for number, outcome in good),
        interrupted=sum(outcome.preemptions > 0 for _, outcome in good),
        duration_seconds=record.duration_seconds,
        longest_pause_seconds=_longest_pause(outcomes),
        longest_first_token_seconds=_longest_first(outcomes),
        undisturbed_longest_pause_seconds=_longest_pause(record.undisturbed),
        undisturbed_longest_first_token_seconds=_longest_first(record.undisturbed),
        strikes=[_strike_report(seen, outcomes) for seen in record.seen],
        errors=dict(Counter(o.error for o in outcomes if o.error is not None)),
    )


def _strike_report(seen: Seen, outcomes: Iterable[Outcome]) -> StrikeReport:
    pauses = (
        later - earlier
        for outcome in outcomes
        for earlier, later in zip(outcome.token_seconds, outcome.token_seconds[1:], strict=False)
        if later > seen.at and earlier < seen.end + _AFTERMATH_SECONDS
    )
    return StrikeReport(
        strike=str(seen.strike),
        at_seconds=seen.strike.at_seconds,
        noticed_seconds=seen.noticed_seconds,
        recovered_seconds=seen.recovered_seconds,
        replaced=seen.replaced,
        longest_pause_seconds=max(pauses, default=0.0),
    )


def _longest_pause(outcomes: Iterable[Outcome]) -> float:
    return max((gap for outcome in outcomes for gap in outcome.gaps_seconds), default=0.0)


def _longest_first(outcomes: Iterable[Outcome]) -> float:
    return max((o.ttft_seconds for o in outcomes if o.token_seconds), default=0.0)


def print_report(report: ChaosReport, console: Console) -> None:
    facts = Table(box=box.SIMPLE_HEAD)
    facts.add_column("what clients saw")
    facts.add_column("undisturbed", justify="right")
    facts.add_column("with strikes", justify="right")
    facts.add_row("requests answered in full", "", f"{report.completed:,}")
    facts.add_row("requests that failed", "", f"{report.failed:,}")
    facts.add_row("texts that differ", "", f"{report.differing:,}")
    facts.add_row("requests that were interrupted", "", f"{report.interrupted:,}")
    facts.add_row(
        "longest pause in a stream",
        f"{report.undisturbed_longest_pause_seconds:.2f} s",
        f"{report.longest_pause_seconds:.2f} s",
    )
    facts.add_row(
        "longest wait for a first token",
        f"{report.undisturbed_longest_first_token_seconds:.2f} s",
        f"{report.longest_first_token_seconds:.2f} s",
    )
    console.print(facts)
    console.print(_strikes(report))
    for error, count in sorted(report.errors.items(), key=lambda item: -item[1]):
        console.print(f"{count} x {error}", markup=False)


def _strikes(report: ChaosReport) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("at", justify="right")
    table.add_column("strike")
    for column in ("noticed after", "ready again after", "longest pause"):
        table.add_column(column, justify="right")
    for strike in report.strikes:
        table.add_row(
            f"{strike.at_seconds:g} s",
            strike.strike,
            _seconds(strike.noticed_seconds),
            _seconds(strike.recovered_seconds),
            _seconds(strike.longest_pause_seconds),
        )
    return table


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"
