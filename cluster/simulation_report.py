"""What `palimpsest simulate` tells: a table for people, JSON for programs, and figures."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from math import isnan
from pathlib import Path
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from cluster.errors import CommandError
from cluster.simulation_plots import plot_capacity, plot_pool
from cluster.traces import Trace
from configs import ResolvedConfig
from scheduler.simulate import SimulationResult, StepCosts

_JSON_BINS = 480

_REFUSALS = {
    "NeverFits": "refused: larger than the pool",
    "BadRequest": "refused: prompt over model.max_model_len",
    "QueueFull": "refused: queue full",
}


class Report:
    def __init__(
        self,
        trace_name: str,
        trace: Trace,
        config: ResolvedConfig,
        costs: StepCosts,
        speed: float,
        results: Sequence[SimulationResult],
    ) -> None:
        """`results`, by pool size, differ in nothing but the pool."""
        self._trace_name = trace_name
        self._trace = trace
        self._config = config
        self._costs = costs
        self._speed = speed
        self._results = results

    def print(self, console: Console) -> None:
        """One table, or as many as it takes to give every pool its column."""
        console.print(
            f"{self._trace_name}: {len(self._trace.requests):,} requests, {self._trace.format}",
            style="bold",
            highlight=False,
        )
        unlimited = console.options.update(width=sys.maxsize)
        rest = self._results
        while rest:
            count = len(rest)
            table = _table(rest)
            while count > 1 and Measurement.get(console, unlimited, table).maximum > console.width:
                count -= 1
                table = _table(rest[:count])
            console.print(table)
            rest = rest[count:]

    def write(self, folder: Path) -> list[str]:
        """Write all files into `folder`; returns their names. Raises CommandError."""
        title = f"{self._trace_name}: {len(self._trace.requests):,} requests"
        names = ["simulation.json"]
        try:
            (folder / names[0]).write_bytes(msgspec.json.format(self._json(), indent=2) + b"\n")
            for result in self._results:
                names.append(f"pool-{result.num_blocks}.png")
                plot_pool(result, title, folder / names[-1])
            if len(self._results) > 1:
                names.append("capacity.png")
                plot_capacity(self._results, title, folder / names[-1])
        except OSError as error:
            raise CommandError(f"Cannot write to {folder}: {error.strerror}.") from error
        return names

    def _json(self) -> bytes:
        config = self._config
        return msgspec.json.encode(
            {
                "trace": {
                    "name": self._trace_name,
                    "format": self._trace.format,
                    "requests": len(self._trace.requests),
                    "speed": self._speed,
                },
                "costs": asdict(self._costs),
                "settings": {
                    "model": {"max_model_len": config.model.max_model_len},
                    "cache": {
                        "block_size": config.cache.block_size,
                        "enable_prefix_caching": config.cache.enable_prefix_caching,
                    },
                    "scheduler": config.scheduler.model_dump(),
                    "parallel": {"pipeline_parallel_size": config.parallel.pipeline_parallel_size},
                },
                "pools": [_pool_as_json(result) for result in self._results],
            }
        )


def _pool_as_json(result: SimulationResult) -> dict[str, Any]:
    figures = {name: getattr(result, name) for name in result.__slots__ if name != "timeline"}
    timeline = result.timeline.binned(_JSON_BINS)
    return {
        **figures,
        "hit_ratio": result.hit_ratio,
        "resume_hit_ratio": result.resume_hit_ratio,
        "recompute_tax": result.recompute_tax,
        "timeline": {
            "edges_seconds": timeline.edges_seconds.tolist(),
            "means": {name: values.tolist() for name, values in timeline.means.items()},
            "increments": {name: values.tolist() for name, values in timeline.increments.items()},
        },
    }


def _table(results: Sequence[SimulationResult]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("pool, in blocks", no_wrap=True)
    for result in results:
        table.add_column(f"{result.num_blocks:,}", justify="right", no_wrap=True)
    for label, value in _rows(results):
        cells = [] if value is None else [value(result) for result in results]
        table.add_row(label, *cells, style="bold" if value is None else None)
    return table


_Cell = Callable[[SimulationResult], str]


def _rows(results: Sequence[SimulationResult]) -> list[tuple[str, _Cell | None]]:
    """Labels and cells; a label without cells is a heading. What is 0 for all pools and an
    exception rather than a figure has no row."""
    refusals = [name for name in _REFUSALS if any(name in r.refused for r in results)]
    cut_short: list[tuple[str, _Cell | None]] = (
        [("cut short at model.max_model_len", lambda r: f"{r.cut_short:,}")]
        if any(r.cut_short for r in results)
        else []
    )
    return [
        ("tokens in the pool", lambda r: f"{(r.num_blocks - 1) * r.block_size:,}"),
        ("Load", None),
        ("requests finished", lambda r: f"{r.finished:,}"),
        *((_REFUSALS[n], lambda r, n=n: f"{r.refused.get(n, 0):,}") for n in refusals),
        *cut_short,
        ("simulated time", lambda r: _seconds(r.simulated_seconds)),
        ("output tokens per second", lambda r: f"{r.output_tokens / r.simulated_seconds:,.0f}"),
        ("computed tokens per second", _computed_per_second),
        ("most running / waiting", lambda r: f"{r.peak_running:,} / {r.peak_waiting:,}"),
        ("Latency", None),
        ("TTFT p50", lambda r: _seconds(r.time_to_first_token.p50_seconds)),
        ("TTFT p99", lambda r: _seconds(r.time_to_first_token.p99_seconds)),
        ("ITL p50", lambda r: _seconds(r.inter_token_latency.p50_seconds)),
        ("ITL p99", lambda r: _seconds(r.inter_token_latency.p99_seconds)),
        ("Prefix cache", None),
        ("hit ratio, first admissions", lambda r: _share(r.hit_ratio)),
        ("blocks evicted", lambda r: f"{r.evictions:,}"),
        ("Preemption", None),
        ("preemptions", lambda r: f"{sum(r.preemptions.values()):,}"),
        ("tokens held", lambda r: f"{r.held_tokens:,}"),
        ("tokens recovered", lambda r: f"{r.recovered_tokens:,}"),
        ("tokens recomputed", lambda r: f"{r.recomputed_tokens:,}"),
        ("hit ratio, resumes", lambda r: _share(r.resume_hit_ratio)),
        ("recompute tax", lambda r: _share(r.recompute_tax)),
        ("Capacity", None),
        ("most blocks held", lambda r: f"{r.peak_held_blocks:,}"),
        ("pool that peak demand asks for", _demand),
        ("  of this one", _demand_ratio),
    ]


def _computed_per_second(result: SimulationResult) -> str:
    return f"{sum(result.scheduled_tokens.values()) / result.simulated_seconds:,.0f}"


def _demand(result: SimulationResult) -> str:
    """Nobody was preempted: the pool was large enough."""
    return f"{result.peak_demand_blocks:,}" if result.peak_demand_blocks else "-"


def _demand_ratio(result: SimulationResult) -> str:
    if not result.peak_demand_blocks:
        return "-"
    return f"{result.peak_demand_blocks / result.num_blocks:.2f} x"


def _share(ratio: float) -> str:
    return "-" if isnan(ratio) else f"{ratio:.2%}"


def _seconds(seconds: float) -> str:
    if isnan(seconds):
        return "-"
    if seconds < 1:
        return f"{seconds * 1000:,.1f} ms"
    return f"{seconds:,.1f} s"
