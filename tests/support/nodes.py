"""A Ray cluster of several nodes on one machine, each with an address of its own, that can die."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import psutil

# Not 127.0.0.1, which Ray replaces by the address of the machine.
HOSTS = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
SPARE_HOST = "127.0.0.5"
_OBJECT_STORE_BYTES = 80 << 20

# A node that is gone is missed after a second and a half; a slow one may take half a minute.
HEALTH_CHECK = {
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "10000",
    "RAY_health_check_failure_threshold": "3",
}
"""For the environment, before a cluster is started."""


class Nodes:
    """Of one CPU each, and so with room for one rank that asks for one. The first is the head."""

    def __init__(self, cluster: Any, folder: str) -> None:
        self._cluster = cluster
        self._folder = folder
        self._nodes: dict[str, Any] = {}

    def add(self, host: str) -> None:
        self._nodes[host] = self._cluster.add_node(
            num_cpus=1,
            node_ip_address=host,
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            temp_dir=self._folder,
        )

    def titles(self, host: str) -> list[str]:
        """Of the processes that run there, as `ps` shows them."""
        titles = []
        for process in self._processes(host):
            with contextlib.suppress(psutil.NoSuchProcess):
                titles.append(" ".join(process.cmdline()))
        return titles

    def kill(self, host: str) -> None:
        """As if it lost its power: everything that runs there is gone at once."""
        for victim in self._processes(host):
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()

    def _processes(self, host: str) -> list[psutil.Process]:
        owned = self._nodes[host].all_processes.values()
        roots = [psutil.Process(info.process.pid) for infos in owned for info in infos]
        return [*roots, *(child for root in roots for child in root.children(recursive=True))]


@contextlib.contextmanager
def ray_nodes(hosts: Sequence[str]) -> Iterator[Nodes]:
    """A connection to such a cluster, of which nothing is left; `set_environment` comes first."""
    import ray
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="ray-")
    cluster = Cluster()
    try:
        nodes = Nodes(cluster, folder)
        for host in hosts:
            nodes.add(host)
        ray.init(
            address=cluster.address,
            namespace="tests",
            log_to_driver=bool(os.environ.get("PALIMPSEST_TEST_LOGS")),
            _node_ip_address=hosts[0],
        )
        yield nodes
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
