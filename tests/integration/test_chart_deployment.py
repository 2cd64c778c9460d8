"""The chart's CPU demo on a real Ray cluster: what KubeRay would do with it, without Kubernetes."""

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

import httpx
import pytest

from tests.support import kubernetes_tools
from tests.support.chart import Rendered, ray_container
from tests.support.chart_node import ChartNode, chart_node
from worker.pull import pull

# Ray, its dashboard, Serve and an engine are started, and the model may have to be fetched.
pytestmark = [pytest.mark.timeout(func_only=True), pytest.mark.xdist_group("chart deployment")]

COMPLETIONS = "/v1/completions"
UNUSED_PORTS = {10001: "Ray client", 9101: "HAProxy's metrics", 8404: "HAProxy's statistics"}
"""Open in every pod, and used by nobody: the network policy leaves them closed."""


@pytest.fixture(scope="module")
def node() -> Iterator[ChartNode]:
    helm = kubernetes_tools.helm()
    if helm is None:
        pytest.skip("there is no Helm on this machine, and none to fetch for it")
    chart = Rendered.of(helm, "cpu-demo")
    # What the init container does.
    pull(chart.values["config"]["model"]["model"])
    with chart_node(chart) as node:
        node.deploy()
        yield node


def test_running_means_ready(node: ChartNode) -> None:
    """An upgrade to a new cluster moves the traffic when Serve says so."""
    with urllib.request.urlopen(f"{node.url}/ready", timeout=10) as answer:
        assert json.load(answer) == {"status": "ready", "reason": None}


def test_the_readiness_probe(node: ChartNode) -> None:
    path = ray_container(node.chart.workers)["readinessProbe"]["httpGet"]["path"]
    assert httpx.get(node.url + path, timeout=10).status_code == 200


def test_helm_test(node: ChartNode) -> None:
    """The hook's own words, in its own order."""
    (container,) = node.chart.only("Pod")["spec"]["containers"]
    program, *arguments = container["command"]
    assert program == "python"
    done = subprocess.run(
        [sys.executable, *arguments],
        env={"SERVICE_URL": node.url},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("smollm2-135m answers: ")


def test_a_pod_ends_after_its_streams(node: ChartNode) -> None:
    """The hook before the end of a container waits for who is connected, and for no one else."""
    program, flag, script = ray_container(node.chart.workers)["lifecycle"]["preStop"]["exec"][
        "command"
    ]
    mine = int(node.url.rpartition(":")[2])
    hook = [program, flag, script.replace(":1F40 ", f":{mine:04X} ")]
    body = {"prompt": "Once", "max_tokens": 600, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", node.url + COMPLETIONS, json=body, timeout=60) as stream:
        lines = stream.iter_lines()  # one that nobody holds closes the connection
        next(lines)
        waiting = subprocess.Popen(hook)
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(2.5)
    assert waiting.wait(10) == 0
    begun = time.monotonic()
    subprocess.run(hook, check=True, timeout=10)
    assert time.monotonic() - begun < 5


def test_nothing_listens_where_the_network_policy_does_not_know(node: ChartNode) -> None:
    helm = kubernetes_tools.helm()
    assert helm is not None
    (among_pods, *_) = Rendered.of(helm, "everything").only("NetworkPolicy")["spec"]["ingress"]
    known = set(UNUSED_PORTS)
    for port in among_pods["ports"]:
        known |= set(range(port["port"], port.get("endPort", port["port"]) + 1))
    back = {ours: theirs for theirs, ours in node.ports.items()}
    unknown = {back.get(port, port) for port in node.listening_ports()} - known
    assert not unknown
