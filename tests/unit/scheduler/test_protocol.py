"""The core in the fake world, briefly; `tests/protocol/` does the same at length.

A failure says how to see it again: `python -m tests.support --seed … --ranges … --episode …`.
"""

import pytest

from tests.support.bugs import OpenedAgainAtOnce, SwappedPlans
from tests.support.episode_config import RANGES, TIGHT, Ranges
from tests.support.run import WorldFailureError, run


@pytest.mark.parametrize("ranges", RANGES.values(), ids=RANGES)
def test_core_keeps_every_rule_in_the_fake_world(ranges: Ranges) -> None:
    report = run(10, ranges, 2_000)
    assert report.num_steps >= 2_000
    for event in ("preemptions", "group losses", "resumes that found something", "stale results"):
        assert report.seen[event], event


def test_a_run_is_the_same_each_time() -> None:
    first, second = run(3, TIGHT, 300), run(3, TIGHT, 300)
    assert first == second
    assert run(4, TIGHT, 300) != first


def test_a_failing_episode_fails_by_itself() -> None:
    with pytest.raises(WorldFailureError) as failure:
        run(8, TIGHT, 2_000, bug=SwappedPlans(), bug_name="swapped-plans")
    *_, command = str(failure.value).splitlines()
    assert command.startswith("see it again: python -m tests.support --seed 8 --ranges tight")
    episode = int(command.split("--episode ")[1].split()[0])
    assert command.endswith("--bug swapped-plans")
    with pytest.raises(WorldFailureError) as again:
        run(8, TIGHT, 1, bug=SwappedPlans(), bug_name="swapped-plans", first_episode=episode)
    assert str(again.value.__cause__) == str(failure.value.__cause__)


def test_the_attempt_tag_alone_keeps_old_results_apart() -> None:
    run(11, TIGHT, 2_000, bug=OpenedAgainAtOnce())
