"""The faults of `tests/support/bugs.py` are found also where nobody looks at the core's invariants:
later, but surely, by what plans say, workers read and clients are told."""

import pytest

from tests.support.bugs import BUGS
from tests.support.episode_config import TIGHT
from tests.support.run import WorldFailureError, run
from tests.support.world import Bug


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
def test_world_finds(bug: type[Bug]) -> None:
    for seed in range(10):
        with pytest.raises(WorldFailureError):
            run(seed, TIGHT, 10_000, bug=bug(), check_invariants=False)
