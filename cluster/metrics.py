"""Counts and gauges in the text formats that Prometheus reads."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf, isfinite

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from cluster.metrics_table import (
    CONFIG_INFO,
    CONFIG_INFO_LABELS,
    CONFIG_INFO_MEANING,
    METRICS,
    PREFIX,
    Metric,
)
from configs.sections import MetricsCompat
from scheduler.messages import Counts, EngineInfo, Gauges, HistogramCounts

_VLLM_PREFIX = "vllm:"
_NO_COUNTS: Mapping[str, HistogramCounts] = {}


class Exposition(Collector):
    """One scrape."""

    def __init__(
        self,
        model_name: str,
        counts: Counts,
        gauges: Gauges | None,
        info: EngineInfo,
        compat: MetricsCompat = "none",
    ) -> None:
        """Without `gauges` there is no engine, and nothing is said of its load."""
        self._model_name = model_name
        self._counts = counts
        self._gauges = {} if gauges is None else gauge_values(gauges)
        self._info = info
        self._compat = compat

    def text(self, accept: str) -> tuple[bytes, str]:
        """The scrape and its content type, in the format that the header `accept` prefers."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        encode, content_type = choose_encoder(accept)
        return encode(registry), content_type

    def collect(self) -> Iterator[Family]:
        for metric in METRICS:
            name, label = PREFIX + metric.name, metric.label
            yield from self._families(metric, name, label.name if label is not None else "")
        if self._info.num_blocks:
            yield self._config_info(PREFIX + CONFIG_INFO.removesuffix("_info"), "num_blocks")
        if self._compat == "vllm":
            yield from self._collect_vllm()

    def _collect_vllm(self) -> Iterator[Family]:
        for metric in METRICS:
            if metric.vllm_name:
                name = _VLLM_PREFIX + metric.vllm_name
                yield from self._families(metric, name, metric.vllm_label)
        if self._info.num_blocks:
            yield self._config_info(f"{_VLLM_PREFIX}cache_config", "num_gpu_blocks")

    def _families(self, metric: Metric, name: str, label: str) -> Iterator[Family]:
        """The family of `metric` under `name`; without a label name its values are added up."""
        label_names = ["model_name", *([label] if label else [])]
        match metric.kind:
            case "histogram":
                yield self._histogram(metric, name, label_names)
            case "counter":
                known = self._counts.counters.get(metric.name, {})
                values: Mapping[str, float] = {v: known.get(v, 0) for v in metric.label_values}
                counter = CounterMetricFamily(name, metric.meaning, labels=label_names)
                self._add(counter, values, by_label=bool(label))
                yield counter
            case "gauge":
                if metric.name in self._gauges:
                    gauge = GaugeMetricFamily(name, metric.meaning, labels=label_names)
                    self._add(gauge, self._gauges[metric.name], by_label=bool(label))
                    yield gauge

    def _add(
        self,
        family: CounterMetricFamily | GaugeMetricFamily,
        values: Mapping[str, float],
        *,
        by_label: bool,
    ) -> None:
        if not by_label:
            family.add_metric([self._model_name], sum(values.values()))
            return
        for label, value in values.items():
            family.add_metric([self._model_name, label], value)

    def _histogram(
        self, metric: Metric, name: str, label_names: Sequence[str]
    ) -> HistogramMetricFamily:
        family = HistogramMetricFamily(name, metric.meaning, labels=label_names)
        by_label = self._counts.histograms.get(metric.name, _NO_COUNTS)
        if len(label_names) > 1:
            for label, counts in sorted(by_label.items()):
                if any(counts.bucket_counts):
                    buckets = _cumulative(metric.bounds, [counts])
                    family.add_metric([self._model_name, label], buckets, counts.sum)
        else:
            buckets = _cumulative(metric.bounds, by_label.values())
            total = sum(counts.sum for counts in by_label.values())
            family.add_metric([self._model_name], buckets, total)
        return family

    def _config_info(self, name: str, num_blocks_label: str) -> Family:
        """A gauge that is 1: the info type of OpenMetrics is none in the older text format."""
        info = self._info
        labels = [
            label if label != "num_blocks" else num_blocks_label for label in CONFIG_INFO_LABELS
        ]
        family = GaugeMetricFamily(
            f"{name}_info", CONFIG_INFO_MEANING, labels=["model_name", *labels]
        )
        concurrency = info.capacity_tokens / info.max_model_len if info.max_model_len else 0.0
        sizes = (info.block_size, info.num_blocks, info.capacity_tokens, round(concurrency, 2))
        family.add_metric([self._model_name, *map(str, sizes)], 1)
        return family


def gauge_values(gauges: Gauges) -> dict[str, dict[str, float]]:
    """By metric, and within it by the value of its label."""
    usable = gauges.held_blocks + gauges.evictable_blocks + gauges.scratch_blocks
    return {
        "requests_running": {"": gauges.running_requests},
        "requests_waiting": {
            "new": gauges.waiting_new_requests,
            "preempted": gauges.waiting_preempted_requests,
        },
        "kv_blocks": {
            "held": gauges.held_blocks,
            "evictable": gauges.evictable_blocks,
            "scratch": gauges.scratch_blocks,
        },
        "kv_cache_usage_ratio": {"": gauges.held_blocks / usable},
        "kv_blocks_wanted": {"": gauges.wanted_blocks},
        "epoch": {"": gauges.epoch},
    }


def _cumulative(
    bounds: Sequence[float], parts: Iterable[HistogramCounts]
) -> list[tuple[str, float]]:
    """The buckets of all `parts` together, each with what lies below it too."""
    sums = [0] * (len(bounds) + 1)
    for part in parts:
        sums = [a + b for a, b in zip(sums, part.bucket_counts, strict=True)]
    buckets, below = [], 0
    for bound, count in zip((*map(float, bounds), inf), sums, strict=True):
        below += count
        buckets.append((repr(bound) if isfinite(bound) else "+Inf", float(below)))
    return buckets
