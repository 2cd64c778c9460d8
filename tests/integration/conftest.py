"""One local Ray cluster for all integration tests of a process, and nothing left of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.leftovers import Leftovers, assert_nothing_left
from tests.support.ray_cluster import local_ray


@pytest.hookimpl(tryfirst=True)  # xdist reads the mark
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # A cluster takes ten seconds to start and both cores to run, so one process has them all.
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("ray"))


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A connection to a Ray cluster of one node, of which nothing may be left at the end."""
    before = Leftovers.now()
    with local_ray():
        yield
    assert_nothing_left(before)
