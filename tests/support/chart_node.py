"""A Ray node started as KubeRay would start a pod of the chart, on this machine."""

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.support.chart import Rendered, environment, ray_container
from tests.support.serving import HOST, free_port

_BIN = Path(sys.executable).parent
_START_SECONDS, _DEPLOY_SECONDS, _STOP_SECONDS, _PATIENCE_SECONDS = 180.0, 180.0, 30.0, 5.0
_PROXY_PORTS = {
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": 8500,
    "RAY_SERVE_HAPROXY_METRICS_PORT": 9101,
    "RAY_SERVE_HAPROXY_STATS_PORT": 8404,
}
_SERVE_PORT, _CONTROL_STORE_PORT, _DASHBOARD_PORT = 8000, 6379, 8265


@dataclass(slots=True)
class ChartNode:
    """Head and worker in one. Each port of the chart is another one here, as a machine may hold
    several of them."""

    chart: Rendered
    ports: dict[int, int]
    """From the chart's to ours."""
    process: subprocess.Popen[bytes]
    variables: dict[str, str]
    folder: Path

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.ports[_SERVE_PORT]}"

    @property
    def dashboard(self) -> str:
        return f"http://{HOST}:{self.ports[_DASHBOARD_PORT]}"

    def deploy(self) -> None:
        """`serve deploy` what the chart says; returns when Serve calls it running."""
        serve = self.chart.serve
        serve["http_options"] |= {"host": HOST, "port": self.ports[_SERVE_PORT]}
        file = self.folder / "serve.yaml"
        file.write_text(yaml.safe_dump(serve))
        command = [str(_BIN / "serve"), "deploy", str(file), "--address", self.dashboard]
        subprocess.run(command, env=self.variables, check=True, capture_output=True, timeout=60)
        deadline = time.monotonic() + _DEPLOY_SECONDS
        while (state := self._application())["status"] != "RUNNING":
            assert state["status"] != "DEPLOY_FAILED", state["message"]
            assert time.monotonic() < deadline, state
            time.sleep(0.5)

    def listening_ports(self) -> set[int]:
        """Of all processes of the cluster; those on which only this machine's own may call are
        among them, since everything here is on the loopback interface."""
        root = psutil.Process(self.process.pid)
        return {
            connection.laddr.port
            for process in root.children(recursive=True)
            for connection in _connections(process)
            if connection.status == psutil.CONN_LISTEN
        }

    def _application(self) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self.dashboard}/api/serve/applications/",
            headers={"Authorization": f"Bearer {self.variables['RAY_AUTH_TOKEN']}"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            (application,) = json.load(answer)["applications"].values()
        found: dict[str, Any] = application
        return found


@contextlib.contextmanager
def chart_node(chart: Rendered) -> Iterator[ChartNode]:
    """Started with the parameters and the environment of both groups of pods, and ended."""
    # Short, because Ray puts sockets into it, whose paths have at most 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="ray-"))
    parameters, ports = _parameters(chart)
    variables = _variables(chart, folder, ports)
    command: list[object] = [_BIN / "ray", "start", "--head", "--block", "--temp-dir", folder]
    command += ["--node-ip-address", HOST, "--dashboard-port", ports[_DASHBOARD_PORT]]
    command += [f"--{name}={value}" for name, value in parameters.items()]
    with (folder / "ray-start.log").open("wb") as log:
        process = subprocess.Popen([*map(str, command)], env=variables, stdout=log, stderr=log)
    node = ChartNode(chart, ports, process, variables, folder)
    try:
        _wait_for_dashboard(node)
        yield node
    finally:
        children = []
        with contextlib.suppress(psutil.NoSuchProcess):  # it did not even start
            children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_SECONDS)
        finally:
            _, alive = psutil.wait_procs(children, timeout=_PATIENCE_SECONDS)
            for left in (process, *alive):
                with contextlib.suppress(psutil.NoSuchProcess):
                    left.kill()
            shutil.rmtree(folder, ignore_errors=True)
    assert not alive, f"left behind: {alive}"


def _parameters(chart: Rendered) -> tuple[dict[str, str], dict[int, int]]:
    """Of `ray start`: those of the head, with the CPUs that KubeRay gives to a worker."""
    parameters = chart.head["rayStartParams"] | chart.workers["rayStartParams"]
    parameters["num-cpus"] = ray_container(chart.workers)["resources"]["requests"]["cpu"]
    parameters["port"] = str(_CONTROL_STORE_PORT)
    parameters["dashboard-host"] = HOST
    ports = {port: free_port() for port in (_SERVE_PORT, _DASHBOARD_PORT)}
    ports |= {port: free_port() for port in _PROXY_PORTS.values()}
    for name, value in parameters.items():
        if name.endswith("port") and "worker" not in name:
            parameters[name] = str(ports.setdefault(int(value), free_port()))
    first = int(parameters["min-worker-port"]) + 100 * secrets.randbelow(90)
    parameters |= {"min-worker-port": str(first), "max-worker-port": str(first + 99)}
    return parameters, ports


def _variables(chart: Rendered, folder: Path, ports: dict[int, int]) -> dict[str, str]:
    """The user's environment, and over it that of the pods."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    theirs = {
        name: value
        for group in chart.groups
        for name, value in environment(ray_container(group)).items()
        if name.startswith("RAY_") or name == "MALLOC_ARENA_MAX"
    }
    # What is once in a pod is several times on a machine.
    own = {variable: str(ports[port]) for variable, port in _PROXY_PORTS.items()}
    for variable, name in {
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": "haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": "admin.sock",
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": "metrics.sock",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": "",
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": "server-state",
    }.items():
        own[variable] = str(folder / name)
    # What `authOptions` of the RayCluster makes KubeRay set.
    own |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    # There is no other node to go to.
    own["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] = "0"
    own |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return mine | theirs | own


def _wait_for_dashboard(node: ChartNode) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        assert node.process.poll() is None, (node.folder / "ray-start.log").read_text()
        with (
            contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError),
            urllib.request.urlopen(f"{node.dashboard}/api/gcs_healthz", timeout=2),
        ):
            return
        assert time.monotonic() < deadline, (node.folder / "ray-start.log").read_text()
        time.sleep(0.2)


def _connections(process: psutil.Process) -> list[Any]:
    try:
        return list(process.net_connections("tcp"))
    except psutil.Error:
        return []
