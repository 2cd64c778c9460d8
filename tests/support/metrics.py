"""Scrapes of `/metrics`, read as Prometheus reads them."""

from collections.abc import Iterable
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

PREFIX = "palimpsest_"
Series = tuple[str, frozenset[tuple[str, str]]]


@dataclass(frozen=True, slots=True)
class Scrape:
    """All samples of one scrape, without the label `model_name`."""

    samples: dict[Series, float]
    counted: frozenset[Series]
    """Those that may never fall: counters, and all of a histogram."""

    def value(self, name: str, **labels: str) -> float:
        """One sample; KeyError if it is not there. `name` goes without our prefix."""
        full_name = name if ":" in name else PREFIX + name
        return self.samples[full_name, frozenset(labels.items())]

    def by_label(self, name: str) -> dict[str, float]:
        """The values of a metric with one label."""
        return {
            value: sample
            for (found, labels), sample in self.samples.items()
            if found == PREFIX + name and len(labels) == 1
            for _, value in labels
        }

    def nonzero(self, name: str) -> dict[str, float]:
        """The same, without those that are 0."""
        return {label: value for label, value in self.by_label(name).items() if value}

    def fallen_since(self, before: "Scrape") -> list[Series]:
        """What is lower than it was, or gone."""
        return [s for s in before.counted if self.samples.get(s, -1.0) < before.samples[s]]


def read_scrape(text: str, model_name: str) -> Scrape:
    """Raises AssertionError if a sample lacks the model's name, or is there twice."""
    samples: dict[Series, float] = {}
    counted: set[Series] = set()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == model_name, sample
            series = (sample.name, frozenset(labels.items()))
            assert series not in samples, series
            samples[series] = sample.value
            if family.type in ("counter", "histogram"):
                counted.add(series)
    return Scrape(samples, frozenset(counted))


def scrape(url: str, model_name: str) -> Scrape:
    answer = httpx.get(f"{url}/metrics", timeout=10)
    assert answer.status_code == 200, answer.text
    return read_scrape(answer.text, model_name)


def assert_bills_add_up(found: Scrape, causes: Iterable[str]) -> None:
    """While no preempted request waits."""
    for cause in causes:
        held, *parts = (
            found.value(f"preempted_tokens_{part}_total", cause=cause)
            for part in ("held", "recovered", "recomputed", "dropped")
        )
        assert held == sum(parts), cause
