"""What several processes have counted, summed so that no sum ever falls.

    replica a ──Tally──►             ┌─ a: its counts ─┐
    replica b ──Tally──►  scheduler ─┤  b: its counts  ├──Tally──► any replica ──total──► scrape
                                     └─ its own counts ┘

Each process counts up from zero, and its counts are kept under its own id: so a report may come
twice, late or from somebody else, a dead process keeps its share of the sum, and a new scheduler
learns from any replica what the last one knew.
"""

from collections.abc import Iterable

import msgspec

from scheduler.messages import Counts, HistogramCounts, Tally

NOTHING = Counts(0, {}, {})
EMPTY = Tally({}, NOTHING, ())


def merged(mine: Tally, theirs: Tally) -> Tally:
    """All that either of them knows."""
    wider = theirs if len(theirs.retired_ids) > len(mine.retired_ids) else mine
    retired = frozenset(wider.retired_ids)
    sources = {name: c for name, c in mine.sources.items() if name not in retired}
    for name, counts in theirs.sources.items():
        known = sources.get(name)
        if name not in retired and (known is None or counts.version > known.version):
            sources[name] = counts
    return Tally(sources, wider.retired, wider.retired_ids)


def with_counts(tally: Tally, source: str, counts: Counts) -> Tally:
    """`tally` with newer counts of one process, unless that was taken for dead."""
    if source in tally.retired_ids:
        return tally
    return msgspec.structs.replace(tally, sources={**tally.sources, source: counts})


def retire(tally: Tally, names: Iterable[str]) -> Tally:
    """Fold the counts of processes that will never report again into one.

    Only whoever collects may do this, or two would fold different ones.
    """
    gone = [name for name in names if name in tally.sources]
    return Tally(
        {name: counts for name, counts in tally.sources.items() if name not in gone},
        _sum(tally.retired, *(tally.sources[name] for name in gone)),
        (*tally.retired_ids, *gone),
    )


def total(tally: Tally) -> Counts:
    """The sum over all processes."""
    return _sum(tally.retired, *tally.sources.values())


def _sum(*parts: Counts) -> Counts:
    counters: dict[str, dict[str, int]] = {}
    histograms: dict[str, dict[str, HistogramCounts]] = {}
    for part in parts:
        for metric, values in part.counters.items():
            sums = counters.setdefault(metric, {})
            for label, value in values.items():
                sums[label] = sums.get(label, 0) + value
        for metric, by_label in part.histograms.items():
            known = histograms.setdefault(metric, {})
            for label, counts in by_label.items():
                known[label] = _added(known[label], counts) if label in known else counts
    return Counts(0, counters, histograms)


def _added(one: HistogramCounts, other: HistogramCounts) -> HistogramCounts:
    pairs = zip(one.bucket_counts, other.bucket_counts, strict=True)
    return HistogramCounts(tuple(a + b for a, b in pairs), one.sum + other.sum)
