"""What the core's books become in a scrape, in situations of which every number is known."""

import pytest

from scheduler.messages import Gauges, Tally
from scheduler.metrics import counts_of, gauges_of
from scheduler.metrics_desk import MetricsDesk
from scheduler.tally import EMPTY, total, with_counts
from tests.support.drive import Driver, text
from tests.support.tallies import counts, tokens_of


def values(driver: Driver) -> dict[str, dict[str, int]]:
    return counts_of(driver.core.accounting, {}, 1).counters


def test_a_preemption_is_billed_to_the_token() -> None:
    """A and B fill a pool of 4 blocks; the third step preempts B, which had computed 32 tokens."""
    driver = Driver(5)
    driver.submit("A", text("a", 31), max_tokens=4)
    driver.submit("B", text("b", 31), max_tokens=4)
    driver.steps(3)
    assert gauges_of(driver.core, driver.now) == Gauges(
        running_requests=1,
        waiting_new_requests=0,
        waiting_preempted_requests=1,
        held_blocks=3,
        evictable_blocks=1,
        scratch_blocks=0,
        wanted_blocks=7,
        epoch=driver.core.group.epoch,
    )
    assert values(driver)["preemptions_total"] == {"blocks": 1}
    assert values(driver)["preempted_tokens_held_total"] == {"blocks": 32}
    assert values(driver)["kv_evictions_total"] == {"": 1}
    driver.run()
    counted = values(driver)
    assert counted["preempted_tokens_recovered_total"] == {"blocks": 16}
    assert counted["preempted_tokens_recomputed_total"] == {"blocks": 16}
    assert counted["resume_cache_queries_total"] == {"blocks": 33}
    assert counted["resume_cache_hits_total"] == {"blocks": 16}
    assert counted["prefix_cache_queries_total"] == {"": 62}
    # The last token of all needs no slot, so each of the two computes 31 + 3.
    assert counted["scheduled_tokens_total"] == {"prompt": 62, "output": 6, "recompute": 16}


def test_the_queue_is_timed_from_submission_to_first_admission() -> None:
    driver = Driver(3, max_num_seqs=1)
    driver.submit("A", text("a", 4), max_tokens=3)
    driver.submit("B", text("b", 4), max_tokens=1)
    driver.run()
    waited = driver.core.accounting.queue_seconds
    # A step takes a second: A is admitted in the first, B when A has had its three.
    assert (waited.count, waited.sum) == (2, 1.0 + 4.0)


def test_a_lost_group_lets_no_counter_fall() -> None:
    driver = Driver(5)
    driver.submit("A", text("a", 31), max_tokens=4)
    driver.steps(2)
    before = values(driver)
    driver.lose_group()
    after = values(driver)
    for name, by_label in before.items():
        assert all(after[name][label] >= value for label, value in by_label.items()), name
    assert after["preemptions_total"] == {"worker_lost": 1}


# -- where all counts meet --------------------------------------------------------------


def test_replicas_that_are_long_gone_become_one_when_there_are_many() -> None:
    desk = MetricsDesk()
    tally = EMPTY
    for number in range(80):
        tally = with_counts(tally, f"r{number}", counts(1, 1))
    desk.take(tally)
    desk.forget_all_but({"r0", "r1"}, now=0.0)
    desk.forget_all_but({"r0", "r1"}, now=500.0)
    assert len(desk.answer(None).tally.sources) == 80
    desk.forget_all_but({"r0"}, now=700.0)
    answer = desk.answer(None).tally
    assert set(answer.sources) == {"r0", "r1"}
    assert tokens_of(answer) == 80
    desk.take(tally)  # from a replica that has not heard of it
    assert tokens_of(desk.answer(None).tally) == 80


def test_few_replicas_are_kept_apart_for_ever() -> None:
    desk = MetricsDesk()
    desk.take(with_counts(EMPTY, "gone", counts(1, 5)))
    desk.forget_all_but((), now=0.0)
    desk.forget_all_but((), now=1e6)
    assert set(desk.answer(None).tally.sources) == {"gone"}


@pytest.mark.parametrize("tally", [EMPTY, Tally({}, counts(1, 3), ("x",))])
def test_what_is_retired_is_counted(tally: Tally) -> None:
    assert total(tally).counters.get("tokens_total", {}) == tally.retired.counters.get(
        "tokens_total", {}
    )
