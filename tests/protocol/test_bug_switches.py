"""The fake world finds what it is there to find: each fault, from every seed, within 2,000 steps.

The faults are in `tests/support/bugs.py`. The same ranges and the same checks for all of them,
and the same again without any fault.
"""

import pytest

from tests.support.bugs import BUGS
from tests.support.episode_config import TIGHT
from tests.support.run import WorldFailureError, run
from tests.support.world import Bug

NUM_STEPS = 2_000
SEEDS = range(10)


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
def test_world_finds(bug: type[Bug]) -> None:
    for seed in SEEDS:
        with pytest.raises(WorldFailureError) as failure:
            run(seed, TIGHT, NUM_STEPS, bug=bug())
        assert failure.value.num_steps <= NUM_STEPS


@pytest.mark.parametrize("seed", SEEDS)
def test_world_finds_nothing_where_there_is_nothing(seed: int) -> None:
    assert run(seed, TIGHT, NUM_STEPS).num_steps >= NUM_STEPS
