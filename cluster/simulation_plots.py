"""The figures of `palimpsest simulate`: a pool over time, and a capacity curve.

Both have a bounded number of points, however long the run was. Nothing is shown on a screen.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator, PercentFormatter
from numpy.typing import NDArray

from scheduler.simulate import SimulationResult

_GAUGE_BINS = 320
_COUNTER_BINS = 80  # counters of a bin must be large enough for their ratio to mean something

# Readable with every common colour blindness, and in grey.
_NAVY, _SKY, _PALE = "#1f4e79", "#8ec1e8", "#e4e7eb"
_ORANGE, _GREEN, _GREY, _INK = "#d9822b", "#3a9d78", "#8b929c", "#30343b"

# Clear of the right axis that one of the panels has, so that all legends stand in one column.
_LEGEND_X = 1.085

_STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9aa0a8",
    "axes.labelcolor": _INK,
    "axes.titlecolor": _INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e9ebee",
    "xtick.color": _INK,
    "ytick.color": _INK,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "savefig.dpi": 130,
}
_THOUSANDS = FuncFormatter(lambda value, _: f"{value:,.0f}")


def plot_pool(result: SimulationResult, title: str, path: Path) -> None:
    """Four panels over time: pool, requests, preemptions and their bill, hit ratios."""
    scale, unit = _time_unit(result.simulated_seconds)
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(11.5, 11), layout="constrained")
        pool, requests, bill, hits = figure.subplots(4, 1, sharex=True)
        _headline(figure, f"{title}\n{_story(result)}")
        _draw_pool(pool, result, scale)
        _draw_requests(requests, result, scale)
        _draw_bill(bill, result, scale)
        _draw_hits(hits, result, scale)
        hits.set_xlabel(f"simulated time ({unit})")
        hits.set_xlim(0, result.simulated_seconds / scale)
        hits.xaxis.set_major_locator(MaxNLocator(nbins=12, steps=[1, 2, 5, 10]))
        figure.align_ylabels()
        _save(figure, path)


def plot_capacity(results: Sequence[SimulationResult], title: str, path: Path) -> None:
    """Recompute tax and p99 TTFT against pool size. `results` differ in their pool alone."""
    by_size = sorted(results, key=lambda result: result.num_blocks)
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(9.5, 7.5), layout="constrained")
        tax, ttft = figure.subplots(2, 1, sharex=True)
        _headline(figure, title)
        _draw_curve(tax, by_size, [100 * result.recompute_tax for result in by_size], _ORANGE)
        tax.set_title("Recompute tax: share of all work that was done before and lost")
        tax.set_ylabel("share of scheduled tokens")
        tax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g} %"))
        tax.set_ylim(0, 1.08 * tax.get_ylim()[1])
        p99 = [result.time_to_first_token.p99_seconds for result in by_size]
        _draw_curve(ttft, by_size, p99, _NAVY)
        ttft.set_title("Time to first token, 99th percentile")
        ttft.set_ylabel("seconds")
        _scale_to_span(ttft, p99)
        _label_pool_sizes(ttft, by_size)
        _draw_demand((tax, ttft), by_size)
        _explain(figure, tax)
        figure.align_ylabels()
        _save(figure, path)


# -- panels over time ---------------------------------------------------------------------


def _draw_pool(axes: Axes, result: SimulationResult, scale: float) -> None:
    bins = result.timeline.binned(_GAUGE_BINS)
    axes.stackplot(
        _middles(bins.edges_seconds) / scale,
        [bins.means[name] for name in ("held_blocks", "evictable_blocks", "scratch_blocks")],
        labels=("held by running requests", "evictable: free, still a hit", "scratch: free, empty"),
        colors=(_NAVY, _SKY, _PALE),
        linewidth=0,
    )
    axes.set_title("Block pool")
    axes.set_ylabel("blocks")
    axes.set_ylim(0, result.num_blocks - 1)
    axes.yaxis.set_major_formatter(_THOUSANDS)
    _legend(axes, reverse=True)


def _draw_requests(axes: Axes, result: SimulationResult, scale: float) -> None:
    bins = result.timeline.binned(_GAUGE_BINS)
    middles = _middles(bins.edges_seconds) / scale
    for gauge, label, color in (
        ("waiting", "waiting", _GREY),
        ("running", "running", _NAVY),
        ("preempted", "preempted, of those waiting", _ORANGE),
    ):
        if gauge != "preempted" or result.preemptions:
            axes.plot(middles, bins.means[gauge], color=color, label=label, linewidth=1.4)
    axes.set_title("Requests")
    axes.set_ylabel("requests")
    if result.peak_waiting > 8 * max(1, result.peak_running):
        axes.set_yscale("symlog", linthresh=10)
        axes.set_ylabel("requests (log above 10)")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(_THOUSANDS)
    _legend(axes)


def _draw_bill(axes: Axes, result: SimulationResult, scale: float) -> None:
    axes.set_title("Preemptions and their bill")
    axes.set_ylabel("tokens per second")
    axes.yaxis.set_major_formatter(_THOUSANDS)
    if not sum(result.preemptions.values()):
        axes.set_yticks([])
        axes.text(
            0.5, 0.5, "nothing was preempted", transform=axes.transAxes, ha="center", va="center"
        )
        return
    bins = result.timeline.binned(_COUNTER_BINS)
    seconds = np.diff(bins.edges_seconds)
    recovered = bins.increments["recovered_tokens"] / seconds
    recomputed = bins.increments["recomputed_tokens"] / seconds
    edges = bins.edges_seconds / scale
    axes.stairs(recomputed, edges, fill=True, color=_ORANGE, label="recomputed")
    axes.stairs(
        recomputed + recovered,
        edges,
        baseline=recomputed,
        fill=True,
        color=_GREEN,
        label="recovered from the cache",
    )
    counts = axes.twinx()
    counts.grid(visible=False)
    preemptions = bins.increments["preemptions"]
    struck = preemptions > 0
    counts.plot(
        (_middles(bins.edges_seconds) / scale)[struck],
        (preemptions / seconds * 60)[struck],
        linestyle="none",
        marker="D",
        markersize=4,
        markerfacecolor="white",
        markeredgecolor=_INK,
        label="preemptions (right axis)",
    )
    counts.set_ylabel("preemptions per minute")
    for either in (axes, counts):
        either.set_ylim(0, 1.08 * either.get_ylim()[1])
    counts.yaxis.set_major_formatter(_THOUSANDS)
    handles, labels = axes.get_legend_handles_labels()
    counted, counted_label = counts.get_legend_handles_labels()
    axes.legend(
        [*reversed(handles), *counted],
        [*reversed(labels), *counted_label],
        loc="upper left",
        bbox_to_anchor=(_LEGEND_X, 1.0),
    )


def _draw_hits(axes: Axes, result: SimulationResult, scale: float) -> None:
    bins = result.timeline.binned(_COUNTER_BINS)
    middles = _middles(bins.edges_seconds) / scale
    for prefix, label, color, overall in (
        ("", "first admissions", _NAVY, result.hit_ratio),
        ("resume_", "resumes", _GREEN, result.resume_hit_ratio),
    ):
        queries = bins.increments[f"{prefix}queries_tokens"]
        if not queries.any():
            continue
        with np.errstate(invalid="ignore"):
            ratio = bins.increments[f"{prefix}hits_tokens"] / queries
        axes.plot(middles, ratio, color=color, marker=".", label=f"{label} ({overall:.1%} overall)")
    axes.set_title("Prefix cache: tokens found of tokens looked up")
    axes.set_ylabel("hit ratio")
    axes.set_ylim(-0.02, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    _legend(axes)


# -- capacity curve -----------------------------------------------------------------------


def _draw_curve(
    axes: Axes, results: Sequence[SimulationResult], values: list[float], color: str
) -> None:
    """A hollow point is not like the others: that pool refused a part of the workload."""
    blocks = [result.num_blocks for result in results]
    axes.plot(blocks, values, color=color, linewidth=1.8)
    for refused, fill, label in ((False, color, None), (True, "white", "some requests refused")):
        chosen = [i for i, result in enumerate(results) if bool(result.refused) == refused]
        if chosen:
            axes.plot(
                [blocks[i] for i in chosen],
                [values[i] for i in chosen],
                linestyle="none",
                marker="o",
                markersize=6,
                markeredgecolor=color,
                markerfacecolor=fill,
                label=label,
                clip_on=False,
                zorder=3,
            )


def _draw_demand(panels: Sequence[Axes], results: Sequence[SimulationResult]) -> None:
    """Where the largest pool puts the size at which preemptions would end."""
    demand_blocks = results[-1].peak_demand_blocks
    if not demand_blocks:
        return
    label = f"peak demand seen with the largest pool: {demand_blocks:,} blocks"
    for axes in panels:
        axes.axvline(demand_blocks, color=_INK, linewidth=1, linestyle="--", label=label)


def _explain(figure: Figure, axes: Axes) -> None:
    """One legend below both panels, if there is anything to explain."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower left", ncols=len(handles))


def _scale_to_span(axes: Axes, values: list[float]) -> None:
    finite = [value for value in values if value > 0]
    if finite and max(finite) > 20 * min(finite):
        axes.set_yscale("log")
        axes.set_ylabel("seconds (log)")
    else:
        axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


def _label_pool_sizes(axes: Axes, results: Sequence[SimulationResult]) -> None:
    blocks = [result.num_blocks for result in results]
    axes.set_xlabel(f"pool size (blocks of {results[0].block_size} tokens)")
    if max(blocks) > 4 * min(blocks):
        axes.set_xscale("log")
        axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(_far_apart(blocks, log=axes.get_xscale() == "log"))
    axes.xaxis.set_major_formatter(_THOUSANDS)


def _far_apart(blocks: list[int], *, log: bool) -> list[int]:
    """As many of the ascending pool sizes as have room for their labels beside each other."""
    places = np.log(blocks) if log else np.asarray(blocks, dtype=np.float64)
    least_gap = 0.09 * (places[-1] - places[0])
    kept = [0]
    for i in range(1, len(blocks)):
        if places[i] - places[kept[-1]] >= least_gap:
            kept.append(i)
    return [blocks[i] for i in kept]


# -- small things -------------------------------------------------------------------------


def _time_unit(seconds: float) -> tuple[float, str]:
    if seconds < 180:
        return 1.0, "seconds"
    return (60.0, "minutes") if seconds < 3 * 3600 else (3600.0, "hours")


def _headline(figure: Figure, text: str) -> None:
    figure.suptitle(text, x=0.01, ha="left", fontsize=13, color=_INK)


def _story(result: SimulationResult) -> str:
    preemptions = sum(result.preemptions.values())
    parts = [
        f"{result.num_blocks:,} blocks of {result.block_size} tokens",
        f"{preemptions:,} preemptions",
    ]
    if result.held_tokens:
        recovered = result.recovered_tokens / result.held_tokens
        parts.append(f"{recovered:.1%} of their tokens recovered")
        parts.append(f"recompute tax {result.recompute_tax:.2%}")
    return "   ·   ".join(parts)


def _middles(edges: NDArray[np.float64]) -> NDArray[np.float64]:
    return (edges[:-1] + edges[1:]) / 2


def _legend(axes: Axes, *, reverse: bool = False) -> None:
    """Beside the panel, in the order in which things lie above each other."""
    axes.legend(loc="upper left", bbox_to_anchor=(_LEGEND_X, 1.0), reverse=reverse)


def _save(figure: Figure, path: Path) -> None:
    FigureCanvasAgg(figure).print_figure(path)
