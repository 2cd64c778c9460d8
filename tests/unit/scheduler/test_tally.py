"""Sums over processes that come and go: nothing twice, nothing lost, nothing falls."""

import random

from hypothesis import given
from hypothesis import strategies as st

from scheduler.messages import HistogramCounts
from scheduler.tally import EMPTY, merged, retire, total, with_counts
from tests.support.tallies import counts, tokens_of


def test_sources_are_added_up() -> None:
    tally = with_counts(with_counts(EMPTY, "a", counts(1, 3)), "b", counts(1, 4))
    assert total(tally).counters == {"tokens_total": {"": 7}}
    assert total(tally).histograms == {"seconds": {"a": HistogramCounts((7, 2), 7.0)}}


def test_a_report_that_comes_twice_or_late_changes_nothing() -> None:
    old, new = with_counts(EMPTY, "a", counts(1, 3)), with_counts(EMPTY, "a", counts(2, 5))
    for tally in (merged(new, old), merged(old, new), merged(merged(old, new), new)):
        assert tokens_of(tally) == 5


def test_a_retired_process_stays_in_the_sum_and_is_not_added_again() -> None:
    both = with_counts(with_counts(EMPTY, "a", counts(1, 3)), "b", counts(1, 4))
    retired = retire(both, ["a", "unknown"])
    assert set(retired.sources) == {"b"}
    assert tokens_of(retired) == 7
    for tally in (merged(retired, both), merged(both, retired)):
        assert tokens_of(tally) == 7
        assert tally.retired_ids == ("a",)
    assert with_counts(retired, "a", counts(2, 9)) == retired


@given(st.integers(0, 2**32))
def test_what_any_replica_shows_never_falls(seed: int) -> None:
    """Replicas count, report and die, also with a scheduler that starts anew or retires them; each
    sum that is shown is at least every sum shown before, and the last one is right."""
    rng = random.Random(seed)
    made: dict[str, int] = {}
    versions: dict[str, int] = {}
    known = {f"r{i}": EMPTY for i in range(3)}
    scheduler, alive, shown = EMPTY, sorted(known), 0

    def exchange(name: str) -> None:
        nonlocal scheduler
        versions[name] = versions.get(name, 0) + 1
        report = with_counts(known[name], name, counts(versions[name], made.get(name, 0)))
        scheduler = merged(scheduler, report)
        known[name] = merged(known[name], scheduler)

    for _ in range(40):
        name = rng.choice(alive)
        match rng.randrange(8):
            case 0 | 1 | 2:
                made[name] = made.get(name, 0) + rng.randrange(5)
            case 3 | 4 | 5:
                exchange(name)
                assert tokens_of(known[name]) >= shown
                shown = tokens_of(known[name])
            case 6 if len(alive) > 1:
                exchange(name)
                alive.remove(name)
                if rng.random() < 0.5:
                    scheduler = retire(scheduler, [name])
                exchange(rng.choice(alive))  # or a scheduler that dies now knew it alone
            case 7:
                scheduler = EMPTY  # it died, and all that live tell the next one what they knew
                for other in alive:
                    exchange(other)
    for name in alive:
        exchange(name)
    assert tokens_of(scheduler) == sum(made.values())
