"""What has to hold in every rendering of the chart, one function for each thing.

Each raises AssertionError. They stand apart from the tests because a second test breaks the
templates on purpose, and wants to see that some of them notice. Here: what runs in the pods; what
stands around them is in `chart_surroundings`.
"""

import re
from pathlib import PurePosixPath

from cluster.app import config_of
from cluster.local_ray import SERVE_ENVIRONMENT
from configs import load
from configs.ranks import world_size
from tests.support.chart import SERVE_PORT, Check, Rendered, environment, ray_container

TEMPORARY = str(PurePosixPath("/", "tmp"))  # of a container
CHECKS: list[Check] = []


def check(function: Check) -> Check:
    CHECKS.append(function)
    return function


@check
def serve_takes_the_application(chart: Rendered) -> None:
    from ray.serve.schema import ServeDeploySchema

    schema = ServeDeploySchema.model_validate(chart.serve)
    assert schema.http_options.port == SERVE_PORT
    assert schema.http_options.host == "0.0.0.0"
    (application,) = schema.applications
    assert (application.import_path, application.route_prefix) == ("cluster.app:build_app", "/")
    assert application.deployment_names == ["Ingress"]


@check
def the_configuration_is_the_one_of_the_values(chart: Rendered) -> None:
    """The loader of the command line reads the rendered settings, and finds what was given."""
    anonymous = chart.values["auth"]["allowAnonymous"]
    environ = {} if anonymous else {"PALIMPSEST_API_KEYS": "some-key"}
    (application,) = chart.serve["applications"]
    config = config_of(application["args"], environ)
    device = "cuda" if chart.values["workers"]["gpusPerNode"] else "cpu"
    assert config.parallel.device == device
    assert config.server.allow_no_auth == anonymous
    given = [
        f"{section}.{key}={value}"
        for section, settings in chart.values["config"].items()
        for key, value in settings.items()
        if not isinstance(value, list)
    ]
    expected = load(overrides=given, environ={}).config
    for override in given:
        section, key = override.split("=")[0].split(".")
        assert getattr(getattr(config, section), key) == getattr(getattr(expected, section), key)
    for section, settings in chart.values["config"].items():
        for key, value in settings.items():
            if isinstance(value, list):
                assert list(getattr(getattr(config, section), key)) == value


@check
def every_rank_finds_a_gpu_beside_its_tensor_group(chart: Rendered) -> None:
    parallel = load(
        overrides=[
            f"parallel.{key}={value}"
            for key, value in chart.values["config"].get("parallel", {}).items()
        ],
        environ={},
    ).config.parallel
    workers, gpus_per_node = chart.workers, chart.values["workers"]["gpusPerNode"]
    limits = ray_container(workers)["resources"]["limits"]
    autoscaling = chart.values["autoscaling"]
    most = autoscaling["maxGroups"] if autoscaling["enabled"] else 1
    least = autoscaling["minGroups"] if autoscaling["enabled"] else 1
    assert workers["replicas"] == workers["minReplicas"]
    assert workers["maxReplicas"] * least == workers["minReplicas"] * most
    pods = workers["replicas"] // least
    if not gpus_per_node:
        assert not any(name.endswith("gpu") for name in limits)
        assert pods == 1
        return
    gpus = limits[chart.values["workers"]["gpuResource"]]
    tp_size = parallel.tensor_parallel_size
    assert 0 < gpus <= gpus_per_node
    assert gpus % tp_size == 0
    assert (pods - 1) * gpus < world_size(parallel) <= pods * gpus
    assert "-cuda" in ray_container(workers)["image"] or chart.values["image"]["digest"]
    assert not any(
        name.endswith("gpu") for name in ray_container(chart.head)["resources"]["limits"]
    )


@check
def only_workers_get_work(chart: Rendered) -> None:
    assert chart.head["rayStartParams"]["num-cpus"] == "0"
    assert chart.head["rayStartParams"]["num-gpus"] == "0"
    assert "num-cpus" not in chart.workers["rayStartParams"]
    (ingress,) = chart.serve["applications"][0]["deployments"]
    assert 0 < ingress["ray_actor_options"]["num_cpus"] < 0.1
    if not chart.values["http"]["autoscaling"]["enabled"]:
        # A pod without a replica has no proxy, and is never ready.
        server = chart.serve["applications"][0]["args"]["server"]
        assert server["num_replicas"] == chart.workers["replicas"]
        assert ingress["max_replicas_per_node"] == 1
    for group in chart.groups:
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())


@check
def shared_memory_is_memory(chart: Rendered) -> None:
    for group in chart.groups:
        container, spec = ray_container(group), group["template"]["spec"]
        (mount,) = (m for m in container["volumeMounts"] if m["mountPath"] == "/dev/shm")
        (volume,) = (v for v in spec["volumes"] if v["name"] == mount["name"])
        assert volume["emptyDir"]["medium"] == "Memory"
        size = _bytes(volume["emptyDir"]["sizeLimit"])
        assert int(group["rayStartParams"]["object-store-memory"]) < size
        assert size < _bytes(container["resources"]["limits"]["memory"])


@check
def volumes_and_mounts_belong_together(chart: Rendered) -> None:
    for group in chart.groups:
        spec = group["template"]["spec"]
        mounted = {
            mount["name"]
            for container in spec.get("initContainers", []) + spec["containers"]
            for mount in container["volumeMounts"]
        }
        assert mounted == {volume["name"] for volume in spec["volumes"]}


@check
def worker_pods_hold_the_model(chart: Rendered) -> None:
    models, spec = chart.values["models"], chart.workers["template"]["spec"]
    (volume,) = (v for v in spec["volumes"] if v["name"] == "models")
    if models["volume"] == "pvc":
        claims = [claim["metadata"]["name"] for claim in chart.of_kind("PersistentVolumeClaim")]
        name = volume["persistentVolumeClaim"]["claimName"]
        assert claims == ([] if models["claim"]["existing"] else [name])
        assert name == models["claim"]["existing"] or name in claims
    elif models["volume"] == "hostPath":
        assert volume["hostPath"]["path"] == models["hostPath"]
    else:
        assert "emptyDir" in volume
    containers = [ray_container(chart.workers)]
    if models["download"]:
        (init,) = spec["initContainers"]
        containers.append(init)
        assert init["command"][:2] == ["palimpsest", "pull"]
        assert init["command"][-1] == chart.values["config"]["model"]["model"]
        revision = chart.values["config"]["model"].get("revision")
        assert (f"--revision={revision}" in init["command"]) == (revision is not None)
    for container in containers:
        paths = {mount["mountPath"] for mount in container["volumeMounts"]}
        variables = environment(container)
        assert "/models" in paths
        assert variables["HF_HOME"].startswith("/models/")
        assert (variables.get("HF_HUB_OFFLINE") == "1") == models["offline"]
        cache = f"{variables['HOME']}/.cache/palimpsest/models"
        assert (cache in paths) != models["readOnly"]


@check
def containers_may_do_little(chart: Rendered) -> None:
    for spec in chart.pod_specs:
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in chart.containers:
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["readOnlyRootFilesystem"] is True
        assert context["capabilities"] == {"drop": ["ALL"]}
    for group in chart.groups:
        container = ray_container(group)
        paths = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert {TEMPORARY, "/dev/shm", environment(container)["HOME"]} <= paths
        account = group["template"]["spec"]["serviceAccountName"]
        assert [account] == [a["metadata"]["name"] for a in chart.of_kind("ServiceAccount")]
        needs_token = group is chart.head and chart.values["autoscaling"]["enabled"]
        assert group["template"]["spec"]["automountServiceAccountToken"] is needs_token


@check
def all_nodes_read_the_same_environment(chart: Rendered) -> None:
    head, worker = (environment(ray_container(group)) for group in chart.groups)
    health, drain = chart.values["ray"]["healthCheck"], chart.values["config"]["server"]
    for variables in (head, worker):
        assert variables["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
        assert variables.items() >= SERVE_ENVIRONMENT.items()
        assert int(variables["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"]) > drain["drain_seconds"]
        assert variables["RAY_health_check_period_ms"] == str(1000 * health["periodSeconds"])
        assert variables["RAY_health_check_timeout_ms"] == str(1000 * health["timeoutSeconds"])
        assert variables["RAY_health_check_failure_threshold"] == str(health["failureThreshold"])
    own = {one["name"] for group in ("head", "workers") for one in chart.values[group]["env"]}
    for name in (head.keys() | worker.keys()) - own:
        assert head.get(name) == worker.get(name), name


@check
def pods_end_after_their_requests(chart: Rendered) -> None:
    drain_seconds = chart.values["config"]["server"]["drain_seconds"]
    spec = chart.workers["template"]["spec"]
    command = ray_container(chart.workers)["lifecycle"]["preStop"]["exec"]["command"]
    patience = re.search(r"SECONDS < (\d+)", command[-1])
    assert patience is not None
    assert drain_seconds <= int(patience[1])
    shutdown = int(
        environment(ray_container(chart.workers))["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"]
    )
    assert int(patience[1]) + shutdown < spec["terminationGracePeriodSeconds"]
    assert f":{SERVE_PORT:X} " in command[-1]
    service = chart.only("RayService")["spec"]
    assert service["rayClusterDeletionDelaySeconds"] >= drain_seconds - 1


@check
def the_control_store_is_kept_where_asked(chart: Rendered) -> None:
    asked = chart.values["ray"]["gcsFaultTolerance"]
    options = chart.cluster.get("gcsFaultToleranceOptions", {})
    if asked["backend"] == "redis":
        assert options["redisAddress"] == asked["redis"]["address"]
        assert (
            options["redisPassword"]["valueFrom"]["secretKeyRef"]["name"]
            == (asked["redis"]["existingSecret"])
        )
    else:
        assert options.get("backend", "") == asked["backend"]


@check
def ray_scales_when_asked(chart: Rendered) -> None:
    enabled = chart.values["autoscaling"]["enabled"]
    assert chart.cluster.get("enableInTreeAutoscaling", False) == enabled
    if enabled:
        options = chart.cluster["autoscalerOptions"]
        assert options["idleTimeoutSeconds"] == chart.values["autoscaling"]["idleTimeoutSeconds"]
    (ingress,) = chart.serve["applications"][0]["deployments"]
    assert ("autoscaling_config" in ingress) == chart.values["http"]["autoscaling"]["enabled"]


@check
def slow_starts_are_waited_for(chart: Rendered) -> None:
    annotations = chart.only("RayService")["metadata"].get("annotations", {})
    assert annotations["ray.io/initializing-timeout"] == chart.values["upgrade"]["startTimeout"]
    strategy = chart.only("RayService")["spec"]["upgradeStrategy"]["type"]
    assert strategy == chart.values["upgrade"]["strategy"]


def _bytes(quantity: str) -> int:
    match = re.fullmatch(r"(\d+)([KMGT]i)?", str(quantity))
    assert match is not None, quantity
    return int(match[1]) << {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40}.get(match[2], 0)
