"""Counts with one number in them."""

from scheduler.messages import Counts, HistogramCounts, Tally
from scheduler.tally import total


def counts(version: int, tokens: int) -> Counts:
    """What a process has counted that has seen `tokens` tokens."""
    histogram = HistogramCounts((tokens, 1), float(tokens))
    return Counts(version, {"tokens_total": {"": tokens}}, {"seconds": {"a": histogram}})


def tokens_of(tally: Tally) -> int:
    return total(tally).counters.get("tokens_total", {}).get("", 0)
