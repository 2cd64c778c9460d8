"""The figures of a load test, as a table and as JSON."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from cluster.bench_client import Outcome
from cluster.bench_load import LoadResult

LATENCIES = {
    "ttft": "time to first token",
    "tpot": "time per output token after the first",
    "itl": "time between two pieces of a stream",
    "e2e": "whole request",
}
LIMITED = ("ttft", "tpot", "e2e")
"""What a request can be held to."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Of one latency, in milliseconds."""

    mean: float
    std: float
    percentiles: dict[str, float]
    """By name, as `p99`."""


@dataclass(frozen=True, slots=True)
class BenchResult:
    """Times are seen by the client; tokens are the server's own count where it gives one."""

    completed: int
    failed: int
    cut_off: int
    """Neither: they were under way when the load was ended early."""
    without_usage: int
    """Completed, but not counted by the server: as prompt tokens count the token ids that were
    sent, and none of a text, as output tokens the pieces of the stream."""
    duration_seconds: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    preemptions: int
    stalled_ms: float
    requests_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    goodput_requests_per_second: float | None
    """Requests within all limits; None: there are no limits."""
    latencies_ms: dict[str, Spread]
    errors: dict[str, int]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def summarize(
    load: LoadResult, *, limits_ms: Mapping[str, float], percentiles: Sequence[float]
) -> BenchResult:
    """`limits_ms` by a name of `LIMITED`. What failed or was cut off counts in no other figure."""
    good = [outcome for outcome in load.outcomes if outcome.error is None]
    seconds = load.duration_seconds
    prompt_tokens = sum(outcome.prompt_tokens or 0 for outcome in good)
    output_tokens = sum(outcome.num_output_tokens for outcome in good)
    within = sum(is_within(outcome, limits_ms) for outcome in good)
    times = {
        "ttft": [outcome.ttft_seconds for outcome in good],
        "tpot": [o.tpot_seconds for o in good if o.tpot_seconds is not None],
        "itl": [gap for outcome in good for gap in outcome.gaps_seconds],
        "e2e": [outcome.e2e_seconds for outcome in good],
    }
    return BenchResult(
        completed=len(good),
        failed=len(load.outcomes) - len(good),
        cut_off=load.num_cut_off,
        without_usage=sum(outcome.output_tokens is None for outcome in good),
        duration_seconds=seconds,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        cached_tokens=sum(outcome.cached_tokens for outcome in good),
        preemptions=sum(outcome.preemptions for outcome in good),
        stalled_ms=sum(outcome.stalled_ms for outcome in good),
        requests_per_second=len(good) / seconds,
        output_tokens_per_second=output_tokens / seconds,
        total_tokens_per_second=(prompt_tokens + output_tokens) / seconds,
        goodput_requests_per_second=within / seconds if limits_ms else None,
        latencies_ms={
            name: _spread(values, percentiles) for name, values in times.items() if values
        },
        errors=dict(Counter(o.error for o in load.outcomes if o.error is not None)),
    )


def is_within(outcome: Outcome, limits_ms: Mapping[str, float]) -> bool:
    """A request of one token has no time per token, so it keeps within any."""
    measured = {
        "ttft": outcome.ttft_seconds,
        "tpot": outcome.tpot_seconds or 0.0,
        "e2e": outcome.e2e_seconds,
    }
    return all(1e3 * measured[name] <= limit for name, limit in limits_ms.items())


def _spread(seconds: Sequence[float], percentiles: Sequence[float]) -> Spread:
    values = 1e3 * np.asarray(seconds)
    cuts = np.percentile(values, percentiles)
    return Spread(
        mean=float(values.mean()),
        std=float(values.std()),
        percentiles={f"p{p:g}": float(v) for p, v in zip(percentiles, cuts, strict=True)},
    )


def print_result(result: BenchResult, console: Console) -> None:
    facts = Table(box=box.SIMPLE, show_header=False)
    facts.add_column()
    facts.add_column(justify="right")
    for name, value in _facts(result):
        facts.add_row(name, value)
    console.print(facts)
    if result.latencies_ms:
        console.print(_latencies(result))
    for error, count in sorted(result.errors.items(), key=lambda item: -item[1]):
        console.print(f"{count} x {error}", markup=False)


def _facts(result: BenchResult) -> list[tuple[str, str]]:
    facts = [
        ("requests answered in full", f"{result.completed:,}"),
        ("requests that failed", f"{result.failed:,}"),
        *_if_any("requests that were cut off", result.cut_off),
        ("duration", f"{result.duration_seconds:.2f} s"),
        ("prompt tokens", f"{result.prompt_tokens:,}"),
        ("output tokens", f"{result.output_tokens:,}"),
        *_if_any("answers without usage, so these are estimates", result.without_usage),
        ("requests per second", f"{result.requests_per_second:.2f}"),
        ("output tokens per second", f"{result.output_tokens_per_second:.2f}"),
        ("tokens per second, prompts too", f"{result.total_tokens_per_second:.2f}"),
    ]
    if result.goodput_requests_per_second is not None:
        goodput = f"{result.goodput_requests_per_second:.2f}"
        facts.append(("requests per second within the limits", goodput))
    facts += _if_any("prompt tokens found in the cache", result.cached_tokens)
    facts += _if_any("preemptions", result.preemptions)
    if result.preemptions:
        facts.append(("stalled by them, all together", f"{result.stalled_ms / 1e3:.2f} s"))
    return facts


def _if_any(name: str, count: int) -> list[tuple[str, str]]:
    return [(name, f"{count:,}")] if count else []


def _latencies(result: BenchResult) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("ms")
    first = next(iter(result.latencies_ms.values()))
    for column in ("mean", "std", *first.percentiles):
        table.add_column(column, justify="right")
    for name, spread in result.latencies_ms.items():
        values = (spread.mean, spread.std, *spread.percentiles.values())
        table.add_row(f"{name.upper()}, {LATENCIES[name]}", *(f"{v:.2f}" for v in values))
    return table
