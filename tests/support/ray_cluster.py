"""A Ray cluster for tests and benchmarks, of which nothing is left."""

import contextlib
import functools
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from cluster.local_ray import SERVE_ENVIRONMENT

REPOSITORY = Path(__file__).parents[2]
_OBJECT_STORE_BYTES = 100 << 20

_ENVIRONMENT = {
    **SERVE_ENVIRONMENT,
    # Not the token of the user's own clusters.
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray has some twenty threads a process, each of which would get a heap of its own from glibc,
    # and keep in it the most that it ever held: growth that nobody could tell from a leak.
    "MALLOC_ARENA_MAX": "2",
    # As with `palimpsest serve`: by default Ray's workers yield to whatever else runs, here to
    # other tests, and where those take both cores nothing answers in time.
    "RAY_worker_niceness": "0",
    # Other tests have the other core: a thread that spins keeps it from the one it waits for.
    "GOMP_SPINCOUNT": "1000",
    # A proxy that died is missed at the third check.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "1.5",
    # Where workers find the fake model.
    "PYTHONPATH": str(REPOSITORY),
}


def set_environment() -> None:
    """For clusters of this process. Ray reads it when it is imported, so this comes first."""
    assert "ray" not in sys.modules, "ray has been imported, and has read another environment"
    os.environ.update(_ENVIRONMENT)
    # Each of the many processes would compile torch's and Ray's modules again, for seconds.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False


@contextlib.contextmanager
def local_ray(*, num_cpus: int = 8) -> Iterator[None]:
    """A connection to a cluster of one node, on the loopback interface; `set_environment` comes
    first.

    With `PALIMPSEST_TEST_LOGS` in the environment its processes are heard.
    """
    import ray

    # Short, because Ray puts sockets into it, whose paths have at most 107 characters.
    folder = tempfile.mkdtemp(prefix="ray-")
    start = functools.partial(
        ray.init,
        num_cpus=num_cpus,
        object_store_memory=_OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=bool(os.environ.get("PALIMPSEST_TEST_LOGS")),
        namespace="tests",
        _node_ip_address="127.0.0.1",
        _temp_dir=folder,
    )
    try:
        try:
            start()
        except Exception:  # Ray has no narrower type for it
            # It gives itself 30 s, which can be too little beside other work.
            ray.shutdown()
            start()
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
