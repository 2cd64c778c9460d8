"""The core in the fake world at length: 20,000 steps from each seed, with 1, 2 and 4 in flight.

A failure says how to see it again: `python -m tests.support --seed … --ranges … --episode …`.
"""

import pytest

from tests.support.episode_config import ONE_IN_FLIGHT, PIPELINE, TWO_IN_FLIGHT, Ranges
from tests.support.run import run

NUM_STEPS = 20_000
MUST_HAPPEN = (
    "NeverFits",
    "QueueFull",
    "cache resets",
    "clamped by the pool",
    "continuations",
    "end before submission",
    "ended by abort",
    "ended by slow_client",
    "ended by stop",
    "ended while preempted",
    "ended while running",
    "ended while waiting",
    "preemptions",
    "prompt logprob rows",
    "resumes that found something",
    "scheduler losses",
    "stale results",
    "submitted again",
)
# Of at least 20,000 over all 150 runs.
MIN_GROUP_LOSSES = 134

windows = pytest.mark.parametrize(
    "ranges", [ONE_IN_FLIGHT, TWO_IN_FLIGHT, PIPELINE], ids=lambda ranges: ranges.name
)


def check(seed: int, ranges: Ranges) -> None:
    report = run(seed, ranges, NUM_STEPS)
    assert report.num_steps >= NUM_STEPS
    assert report.seen["group losses"] >= MIN_GROUP_LOSSES
    missing = [event for event in MUST_HAPPEN if not report.seen[event]]
    assert not missing
    assert report.seen["full windows"] >= NUM_STEPS // 10
    if ranges is not ONE_IN_FLIGHT:
        assert report.seen["tokens of a closed table"]


@windows
@pytest.mark.parametrize("seed", range(10))
def test_core_keeps_every_rule(seed: int, ranges: Ranges) -> None:
    check(seed, ranges)


@pytest.mark.full
@windows
@pytest.mark.parametrize("seed", range(10, 50))
def test_core_keeps_every_rule_for_longer(seed: int, ranges: Ranges) -> None:
    check(seed, ranges)
