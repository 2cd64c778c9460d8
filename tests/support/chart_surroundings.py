"""What has to hold around the pods: who finds them, who reaches them, where secrets lie."""

import re
from collections.abc import Iterator
from typing import Any

from cluster.app import config_of
from tests.support.chart import (
    RELEASE,
    SERVE_PORT,
    Check,
    Rendered,
    environment,
    ray_container,
)

_SERVICE_URL = re.compile(r"^http://(.+):(\d+)$")
CHECKS: list[Check] = []


def check(function: Check) -> Check:
    CHECKS.append(function)
    return function


@check
def ray_asks_for_a_token(chart: Rendered) -> None:
    auth = chart.values["auth"]["ray"]
    variables = environment(ray_container(chart.head))
    if auth["mode"] == "token":
        assert chart.cluster["authOptions"]["mode"] == "token"
        assert chart.cluster["authOptions"].get("secretName", "") == auth["existingSecret"]
        assert "RAY_AUTH_MODE" not in variables
    else:
        assert "authOptions" not in chart.cluster
        assert variables["RAY_AUTH_MODE"] == "disabled"


@check
def secrets_are_where_they_are_looked_for(chart: Rendered) -> None:
    made = {
        secret["metadata"]["name"]: secret["stringData"].keys()
        for secret in chart.of_kind("Secret")
    }
    auth = chart.values["auth"]
    theirs = {
        (auth["apiKeys"]["existingSecret"], "api-keys"),
        (auth["adminKey"]["existingSecret"], "admin-key"),
        (auth["huggingFace"]["existingSecret"], "token"),
        (chart.values["ray"]["gcsFaultTolerance"]["redis"]["existingSecret"], "password"),
    }
    wanted = {"PALIMPSEST_API_KEYS": not auth["allowAnonymous"]}
    wanted["PALIMPSEST_ADMIN_KEY"] = any(auth["adminKey"].values())
    for variable, is_wanted in wanted.items():
        for group in chart.groups:
            names = [one["name"] for one in ray_container(group)["env"]]
            assert names.count(variable) == is_wanted, variable
    test = chart.only("Pod")["spec"]["containers"][0]
    assert ("PALIMPSEST_API_KEYS" in [one["name"] for one in test["env"]]) == wanted[
        "PALIMPSEST_API_KEYS"
    ]
    found = set()
    for reference in _secret_references(chart.manifests):
        name, key = reference["name"], reference["key"]
        found.add((name, key))
        assert key in made.get(name, ()) or (name, key) in theirs, (name, key)
    assert {(name, key) for name, keys in made.items() for key in keys} <= found


@check
def secrets_are_written_nowhere_else(chart: Rendered) -> None:
    values = {
        value for secret in chart.of_kind("Secret") for value in secret["stringData"].values()
    }
    others = str([manifest for manifest in chart.manifests if manifest["kind"] != "Secret"])
    for value in values:
        for part in value.split(","):
            assert part not in others


@check
def selectors_find_their_pods(chart: Rendered) -> None:
    labels = [group["template"]["metadata"]["labels"] for group in chart.groups]
    head, worker = labels
    budgets = {
        budget["metadata"]["name"].rpartition("-")[2]: _selected(budget["spec"]["selector"], labels)
        for budget in chart.of_kind("PodDisruptionBudget")
    }
    assert budgets == {"head": [head], "worker": [worker]}
    for policy in chart.of_kind("NetworkPolicy"):
        assert _selected(policy["spec"]["podSelector"], labels) == labels
    monitors = {
        monitor["metadata"]["name"].endswith("-ray"): _selected(monitor["spec"]["selector"], labels)
        for monitor in chart.of_kind("PodMonitor")
    }
    assert monitors in ({}, {True: labels, False: [head]})
    spread = chart.workers["template"]["spec"].get("topologySpreadConstraints", [])
    assert len(spread) == bool(chart.values["workers"]["spreadOver"])
    for constraint in spread:
        assert _selected(constraint["labelSelector"], labels) == [worker]
    for one in labels:
        assert one["app.kubernetes.io/instance"] == RELEASE
        for key in one:
            assert not key.startswith("ray.io/"), "these are KubeRay's"


@check
def disruption_budgets_are_the_ones_asked_for(chart: Rendered) -> None:
    """As numbers of pods that stay: KubeRay's have no owner that says how many there should be."""
    may_go = chart.values["podDisruptionBudgets"]["maxUnavailable"]
    num_pods = {"head": 1, "workers": chart.workers["replicas"]}
    least = {group: max(0, num_pods[group] - may_go[group]) for group in num_pods}
    budgets = {
        budget["metadata"]["name"].rpartition("-")[2]: budget["spec"]
        for budget in chart.of_kind("PodDisruptionBudget")
    }
    assert {name: spec["minAvailable"] for name, spec in budgets.items()} == {
        "head": least["head"],
        "worker": least["workers"],
    }
    assert not any("maxUnavailable" in spec for spec in budgets.values())


@check
def pods_are_ready_when_their_proxy_is(chart: Rendered) -> None:
    container = ray_container(chart.workers)
    probe = container["readinessProbe"]
    assert probe["httpGet"] == {"path": "/-/healthz", "port": "serve"}
    assert probe["failureThreshold"] == 1
    for group in chart.groups:
        ports = {port["name"]: port["containerPort"] for port in ray_container(group)["ports"]}
        assert ports["serve"] == SERVE_PORT
        assert str(ports["metrics"]) == group["rayStartParams"]["metrics-export-port"]
    assert {"gcs-server", "dashboard"} <= {p["name"] for p in ray_container(chart.head)["ports"]}


@check
def monitors_scrape_ports_that_exist(chart: Rendered) -> None:
    for monitor in chart.of_kind("PodMonitor"):
        own = not monitor["metadata"]["name"].endswith("-ray")
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert endpoint["port"] == ("serve" if own else "metrics")
        assert endpoint["path"] == "/metrics"


@check
def requests_come_in_at_the_serve_service(chart: Rendered) -> None:
    name = chart.only("RayService")["metadata"]["name"]
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name)
    assert len(name) <= 47
    targets = [
        (path["backend"]["service"]["name"], path["backend"]["service"]["port"]["number"])
        for ingress in chart.of_kind("Ingress")
        for rule in ingress["spec"]["rules"]
        for path in rule["http"]["paths"]
    ]
    for route in chart.of_kind("HTTPRoute"):
        (rule,) = route["spec"]["rules"]
        targets += [(backend["name"], backend["port"]) for backend in rule["backendRefs"]]
    url = environment(chart.only("Pod")["spec"]["containers"][0])["SERVICE_URL"]
    match = _SERVICE_URL.match(url)
    assert match is not None
    targets.append((match[1], int(match[2])))
    assert set(targets) == {(f"{name}-serve-svc", SERVE_PORT)}


@check
def the_network_policy_has_the_ports_that_are_used(chart: Rendered) -> None:
    from ray.serve._private import constants

    for policy in chart.of_kind("NetworkPolicy"):
        among_pods, requests, operator, monitoring = policy["spec"]["ingress"]
        selector = policy["spec"]["podSelector"]
        assert among_pods["from"] == [{"podSelector": selector}]
        parallel = config_of(chart.serve["applications"][0]["args"], {"PALIMPSEST_API_KEYS": "k"})
        first, last = parallel.parallel.first_port, parallel.parallel.last_port
        used = [
            *(range(int(port), int(port) + 1) for port in _ray_ports(chart)),
            range(
                int(chart.head["rayStartParams"]["min-worker-port"]),
                int(chart.head["rayStartParams"]["max-worker-port"]) + 1,
            ),
            range(first, last + 1),
            range(
                constants.RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT,
                constants.RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT,
            ),
        ]
        fallback = constants.RAY_SERVE_FALLBACK_PROXY_HTTP_PORT
        used.append(range(fallback, fallback + 1))
        for group in chart.groups:
            spec = group["template"]["spec"]
            (sysctl,) = spec["securityContext"]["sysctls"]
            assert sysctl["name"] == "net.ipv4.ip_local_port_range"
            low, high = map(int, sysctl["value"].split())
            used.append(range(low, high + 1))
            used += [
                range(port["containerPort"], port["containerPort"] + 1)
                for port in ray_container(group)["ports"]
            ]
        open_ports = _ports(among_pods)
        for ports in used:
            assert set(ports) <= open_ports, ports
        assert _ports(requests) == {SERVE_PORT}
        assert _ports(operator) == {8265, 52365, SERVE_PORT}
        assert _ports(monitoring) == {8080, SERVE_PORT}
        asked = chart.values["networkPolicy"]
        assert operator["from"] == asked["operator"]
        assert monitoring["from"] == asked["monitoring"]
        assert ("from" in requests) == bool(asked["clients"])
        if asked["clients"]:
            tester, *clients = requests["from"]
            test_labels = chart.only("Pod")["metadata"]["labels"].items()
            assert tester["podSelector"]["matchLabels"].items() <= test_labels
            assert clients == asked["clients"]


def _ray_ports(chart: Rendered) -> Iterator[str]:
    yield "6379"  # Ray's own default for its control store, which nothing changes
    for group in chart.groups:
        for name, value in group["rayStartParams"].items():
            if name.endswith("-port") and "worker" not in name:
                yield value


def _ports(rule: dict[str, Any]) -> set[int]:
    return {
        number
        for port in rule["ports"]
        for number in range(port["port"], port.get("endPort", port["port"]) + 1)
    }


def _selected(selector: dict[str, Any], pods: list[dict[str, str]]) -> list[dict[str, str]]:
    wanted = selector["matchLabels"].items()
    return [labels for labels in pods if wanted <= labels.items()]


def _secret_references(value: Any) -> Iterator[dict[str, str]]:
    if isinstance(value, dict):
        if "secretKeyRef" in value:
            yield value["secretKeyRef"]
        for inner in value.values():
            yield from _secret_references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _secret_references(inner)
