"""One local Ray cluster for all integration tests of a process, and nothing left of it."""

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# Ray reads these when it is imported, not when it is started.
os.environ["RAY_AUTH_MODE"] = "token"
os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import ray

from tests.support.leftovers import Leftovers, assert_nothing_left

REPOSITORY = Path(__file__).parents[2]
NUM_CPUS = 8
_OBJECT_STORE_BYTES = 100 << 20


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # A cluster takes ten seconds to start and both cores to run, so one process has them all.
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("ray"))


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A connection to a Ray cluster of one node, of which nothing may be left at the end."""
    before = Leftovers.now()
    # Short, because Ray puts sockets into it, whose paths have at most 107 characters.
    folder = tempfile.mkdtemp(prefix="ray-")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(REPOSITORY))
        ray.init(
            num_cpus=NUM_CPUS,
            object_store_memory=_OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=bool(os.environ.get("PALIMPSEST_TEST_LOGS")),
            namespace="tests",
            _node_ip_address="127.0.0.1",
            _temp_dir=folder,
        )
        try:
            yield
        finally:
            ray.shutdown()
            shutil.rmtree(folder, ignore_errors=True)
    assert_nothing_left(before)
