"""The table of metrics, its page, and what the processes really count: all three say the same."""

from pathlib import Path

from cluster.api_errors import ApiError
from cluster.fault_counts import FaultCounts
from cluster.metrics import gauge_values
from cluster.metrics_counts import ERROR_STATUSES, ReplicaCounts
from cluster.metrics_reference import markdown
from cluster.metrics_table import METRICS
from scheduler.accounting import Accounting
from scheduler.histogram import Histogram
from scheduler.messages import Counts, Gauges, InterruptionCause
from scheduler.metrics import counts_of
from scheduler.tally import EMPTY, merged, total, with_counts

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"


def everything_counted() -> Counts:
    accounting = Accounting()
    for cause in InterruptionCause:
        accounting.by_cause[cause].preemptions += 1
    steps = {part: Histogram.of_step_seconds() for part in ("plan", "execute", "apply")}
    scheduler = with_counts(EMPTY, "scheduler", counts_of(accounting, steps, 1))
    replica = with_counts(EMPTY, "replica", ReplicaCounts().copy())
    counts = FaultCounts()
    counts.restarted(["scheduler", "worker 3"])
    counts.recovered(2.5)
    return total(merged(merged(scheduler, replica), counts.report()))


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == markdown(), (
        "run: .venv/bin/python -m cluster.metrics_reference > docs/metrics.md"
    )


def test_every_metric_of_the_table_is_counted_and_none_besides() -> None:
    counts = everything_counted()
    of_kind = {
        kind: {m.name for m in METRICS if m.kind == kind} for kind in ("counter", "histogram")
    }
    assert set(counts.counters) == of_kind["counter"]
    assert set(counts.histograms) == of_kind["histogram"]
    gauges = gauge_values(Gauges(1, 2, 3, 4, 5, 6, 7, 8))
    assert set(gauges) == {metric.name for metric in METRICS if metric.kind == "gauge"}


def test_labels_and_buckets_are_those_of_the_table() -> None:
    counts, gauges = everything_counted(), gauge_values(Gauges(1, 2, 3, 4, 5, 6, 7, 8))
    for metric in METRICS:
        found = (
            counts.counters.get(metric.name)
            or counts.histograms.get(metric.name)
            or gauges[metric.name]
        )
        assert set(found) <= set(metric.label_values), metric.name
        for histogram in counts.histograms.get(metric.name, {}).values():
            assert len(histogram.bucket_counts) == len(metric.bounds) + 1, metric.name


def test_every_error_of_the_api_has_a_status_that_is_counted() -> None:
    kinds = [ApiError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    assert {kind.status for kind in kinds} == set(ERROR_STATUSES)


def test_names_follow_the_rules() -> None:
    for metric in METRICS:
        assert (metric.kind == "counter") == metric.name.endswith("_total"), metric.name
        assert bool(metric.bounds) == (metric.kind == "histogram"), metric.name
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)


def test_faults_are_counted_by_their_engine() -> None:
    counts = everything_counted()
    assert counts.counters["worker_restarts_total"] == {"": 1}
    assert counts.histograms["recovery_seconds"][""].sum == 2.5
