"""Binning keeps what was recorded: means over time, sums of what was counted."""

import numpy as np
import pytest

from scheduler.simulate import Quantiles, Timeline


def row(held: int, preemptions: int) -> tuple[int, ...]:
    gauges = (held, *([0] * (len(Timeline.GAUGES) - 1)))
    return (*gauges, preemptions, *([0] * (len(Timeline.COUNTERS) - 1)))


def test_gauges_are_weighted_by_time() -> None:
    timeline = Timeline()
    timeline.record(0.0, *row(10, 0))
    timeline.record(1.0, *row(30, 0))
    timeline.record(4.0, *row(0, 0))
    bins = timeline.binned(2)
    assert bins.edges_seconds.tolist() == [0, 2, 4]
    assert bins.means["held_blocks"].tolist() == [20, 30]
    assert timeline.peak("held_blocks") == 30


def test_before_the_first_row_there_is_nothing() -> None:
    timeline = Timeline()
    timeline.record(2.0, *row(10, 3))
    timeline.record(4.0, *row(0, 3))
    bins = timeline.binned(2)
    assert bins.means["held_blocks"].tolist() == [0, 10]
    assert bins.increments["preemptions"].tolist() == [3, 0]


def test_counters_add_up_whatever_the_bins() -> None:
    random_numbers = np.random.default_rng(3)
    times = np.sort(random_numbers.uniform(0, 100, 500))
    counts = np.cumsum(random_numbers.integers(0, 5, 500))
    timeline = Timeline()
    for seconds, count in zip(times, counts, strict=True):
        timeline.record(float(seconds), *row(1, int(count)))
    for num_bins in (1, 7, 480):
        increments = timeline.binned(num_bins).increments["preemptions"]
        assert len(increments) == num_bins
        assert increments.min() >= 0
        assert increments.sum() == counts[-1]


def test_an_empty_timeline_cannot_be_binned() -> None:
    assert len(Timeline()) == 0
    with pytest.raises(ValueError, match="nothing was recorded"):
        Timeline().binned(3)


def test_a_quantile_of_nothing_is_no_number() -> None:
    from array import array

    assert np.isnan(Quantiles.of(array("d")).p99_seconds)
    assert Quantiles.of(array("d", range(101))) == Quantiles(50, 99)
