"""The figures: nothing overlaps, nothing is cut off, and their points say what the runs did."""

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backend_bases import RendererBase
from matplotlib.collections import Collection
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import BboxBase

from cluster import simulation_plots
from cluster.simulation_plots import plot_capacity, plot_pool
from scheduler.simulate import SimulationResult, TraceRequest
from tests.unit.simulate.conftest import Run

FILE = Path("not-written.png")


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that would have been saved; the files are a test of the command."""
    kept: list[Figure] = []
    monkeypatch.setattr(simulation_plots, "_save", lambda figure, path: kept.append(figure))
    return kept


def pressed(run: Run, num_blocks: int) -> SimulationResult:
    return run([TraceRequest(i * 0.05, 64, 200) for i in range(60)], num_blocks=num_blocks)


def drawn_texts(figure: Figure) -> list[Text]:
    """What drawing really draws: figures also hold hidden labels and those beyond a limit."""
    drawn: dict[Text, None] = {}
    draw = Text.draw

    def record(text: Text, renderer: RendererBase) -> None:
        drawn[text] = None
        draw(text, renderer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Text, "draw", record)
        figure.draw_without_rendering()
    return [text for text in drawn if text.get_visible() and text.get_text().strip()]


def assert_readable(figure: Figure) -> None:
    texts = [(text.get_text(), text.get_window_extent()) for text in drawn_texts(figure)]
    for text, box in texts:
        assert within(box, figure.bbox), f"{text!r} is cut off"
    for (text, box), (other_text, other_box) in combinations(texts, 2):
        assert not overlap(box, other_box), f"{text!r} lies over {other_text!r}"
    legends = [axes.get_legend() for axes in figure.axes] + list(figure.legends)
    boxes = [legend.get_window_extent() for legend in legends if legend is not None]
    panels = {axes.get_position().bounds: axes for axes in figure.axes}  # twins count once
    boxes += [axes.get_window_extent() for axes in panels.values()]
    for one, another in combinations(boxes, 2):
        assert not overlap(one, another)
    for axes in figure.axes:
        assert axes.get_ylabel(), "an axis without a name"


def within(box: BboxBase, whole: BboxBase) -> bool:
    return bool(box.x0 >= -1 and box.y0 >= -1 and box.x1 <= whole.x1 + 1 and box.y1 <= whole.y1 + 1)


def overlap(one: BboxBase, other: BboxBase) -> bool:
    return bool(one.padded(-1).overlaps(other.padded(-1)))


def top_of(area: Collection) -> float:
    return float(np.asarray(area.get_paths()[0].vertices)[:, 1].max())


def test_a_pool_under_pressure(run: Run, figures: list[Figure]) -> None:
    result = pressed(run, num_blocks=64)
    plot_pool(result, "a trace of some name.jsonl.gz: 60 requests", FILE)
    (figure,) = figures
    assert_readable(figure)
    pool, requests, bill, hits, counts = figure.axes
    held, evictable, scratch = pool.collections
    assert top_of(scratch) == pytest.approx(63)
    most_held = result.timeline.binned(320).means["held_blocks"].max()
    assert top_of(held) == pytest.approx(most_held)
    assert top_of(held) <= top_of(evictable) <= top_of(scratch)
    assert [line.get_label() for line in requests.lines] == [
        "waiting",
        "running",
        "preempted, of those waiting",
    ]
    per_minute = np.asarray(counts.lines[0].get_ydata())
    per_bin = per_minute * result.simulated_seconds / 80 / 60
    assert np.sum(per_bin) == pytest.approx(sum(result.preemptions.values()))
    assert len(bill.patches) == 2
    assert "0.0% overall" in str(hits.lines[0].get_label())
    assert hits.get_xlabel() == "simulated time (seconds)"


def test_a_pool_that_never_preempts_says_so(run: Run, figures: list[Figure]) -> None:
    plot_pool(run([TraceRequest(0.0, 100, 1)]), "one request", FILE)
    (figure,) = figures
    assert_readable(figure)
    assert len(figure.axes) == 4
    assert [text.get_text() for text in figure.axes[2].texts] == ["nothing was preempted"]


def test_a_capacity_curve(run: Run, figures: list[Figure]) -> None:
    results = [pressed(run, num_blocks) for num_blocks in (300, 40, 80)]
    plot_capacity(results, "a trace: 60 requests", FILE)
    (figure,) = figures
    assert_readable(figure)
    tax, ttft = figure.axes
    assert list(np.asarray(tax.lines[0].get_xdata())) == [40, 80, 300]
    by_size = [results[1], results[2], results[0]]
    assert np.asarray(tax.lines[0].get_ydata()) == pytest.approx(
        [100 * result.recompute_tax for result in by_size]
    )
    assert np.asarray(ttft.lines[0].get_ydata()) == pytest.approx(
        [result.time_to_first_token.p99_seconds for result in by_size]
    )


def test_pools_that_refused_requests_stand_out(run: Run, figures: list[Figure]) -> None:
    requests = [TraceRequest(0.0, 100, 5), TraceRequest(0.0, 1000, 5)]
    results = [run(requests, num_blocks=num_blocks) for num_blocks in (20, 200)]
    plot_capacity(results, "a trace: 2 requests", FILE)
    (figure,) = figures
    assert_readable(figure)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["some requests refused"]


def test_labels_of_close_pool_sizes_do_not_collide(run: Run, figures: list[Figure]) -> None:
    sizes = (4000, 4001, 4100, 5000, 9000, 9050, 40_000, 41_000)
    results = [run([TraceRequest(0.0, 100, 5)], num_blocks=size) for size in sizes]
    plot_capacity(results, "a trace: 1 request", FILE)
    (figure,) = figures
    assert_readable(figure)
    labels = [text.get_text() for text in figure.axes[1].get_xticklabels()]
    assert labels == ["4,000", "5,000", "9,000", "40,000"]
