"""What Helm makes of the chart, for every case in its folder ci/."""

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.app import config_of
from configs import ConfigError, load
from helm.generate import CHART, FOLDER, contents
from tests.support import chart_checks, chart_surroundings, kubernetes_tools
from tests.support.chart import CASES, Check, RefusedError, Rendered, run_helm, values_file
from tests.support.crd import problems

Render = Callable[[str], Rendered]

CHECKS = chart_checks.CHECKS + chart_surroundings.CHECKS

EXAMPLES = {"cpu-demo": 4, "one-gpu": 5, "tp4": 3, "tp8-pp2": 6}
"""Cases with the settings of an example of the same name, and how many these are."""


def test_the_cases_are_the_ones_that_are_promised() -> None:
    promised = ["air-gapped", "cpu-demo", "everything", "one-gpu", "tp4", "tp8-pp2"]
    assert promised == CASES


def test_generated_files_are_up_to_date() -> None:
    """Run `python -m helm.generate` if this fails."""
    for path, text in contents().items():
        assert path.read_text() == text, path


@pytest.mark.parametrize("case", CASES)
def test_lint(helm: Path, case: str) -> None:
    run_helm(helm, "lint", "--strict", CHART, "--values", values_file(case))


def test_it_installs_as_it_stands(helm: Path) -> None:
    chart = Rendered.of(helm, None)
    for one in CHECKS:
        one(chart)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("one", CHECKS, ids=lambda one: one.__name__)
def test_checks(rendered: Render, case: str, one: Check) -> None:
    one(rendered(case))


def test_kubernetes_knows_every_field(rendered: Render, tmp_path: Path) -> None:
    files = []
    for case in CASES:
        files.append(tmp_path / f"{case}.yaml")
        files[-1].write_text(rendered(case).text)
    folder = kubernetes_tools.kubernetes_validate()
    done = subprocess.run(
        [sys.executable, folder / "bin" / "kubernetes-validate", "--strict", *files],
        env={"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("passed for resource") > 4 * len(CASES)


@pytest.fixture(scope="module")
def definition(test_data_dir: Path | None) -> dict[str, Any]:
    """KubeRay 1.7's own definition of a RayService."""
    if test_data_dir is None:
        pytest.skip("KubeRay's definitions are not in the repository")
    with gzip.open(test_data_dir / "kuberay" / "crd_rayservices.yaml.gz", "rb") as file:
        found: dict[str, Any] = yaml.load(file, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return found


@pytest.mark.parametrize("case", CASES)
def test_kuberay_knows_every_field(rendered: Render, case: str, definition: dict[str, Any]) -> None:
    assert problems(definition, rendered(case).only("RayService")) == []


@pytest.mark.parametrize(
    "sets",
    [
        "ray.gcsFaultTolerance.backend=rocksdb,ray.gcsFaultTolerance.rocksdb.storageClassName=fast",
        "auth.ray.mode=disabled",
        "upgrade.strategy=None,upgrade.startTimeout=",
        "http.replicas=3,workers.spreadOver=",
        "podDisruptionBudgets.maxUnavailable.workers=2",
        "serviceAccount.create=false",
    ],
)
def test_kuberay_knows_the_fields_of_other_choices(
    helm: Path, sets: str, definition: dict[str, Any]
) -> None:
    chart = Rendered.of(helm, None, sets=[sets])
    assert problems(definition, chart.only("RayService")) == []


def test_kuberay_would_refuse(rendered: Render, definition: dict[str, Any]) -> None:
    service = json.loads(json.dumps(rendered("cpu-demo").only("RayService")))
    service["spec"]["upgradeStrateggy"] = {}
    service["spec"]["rayClusterConfig"]["headGroupSpec"]["rayStartParams"]["num-cpus"] = 0
    service["spec"]["rayClusterConfig"]["managedBy"] = "nobody"
    found = "\n".join(problems(definition, service))
    for words in ("upgradeStrateggy", "['num-cpus']: 0 is not of type", "managedBy: the rule"):
        assert words in found


@pytest.mark.parametrize("case", EXAMPLES)
def test_cases_are_the_examples(rendered: Render, case: str) -> None:
    example = load(FOLDER.parent / "configs" / "examples" / f"{case}.yaml", environ={})
    given = [name for name, source in example.sources.items() if source.kind == "file"]
    given = [name for name in given if name != "server.host"]  # the chart's own affair
    for name in given:
        section, key = name.split(".")
        value = rendered(case).values["config"][section][key]
        loaded = load(overrides=[f"{name}={value}"], environ={}).config
        for config in (loaded, example.config):
            assert getattr(getattr(config, section), key) == getattr(
                getattr(example.config, section), key
            )
    assert len(given) == EXAMPLES[case]


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        ("config.cache.block_sizes=4", "'/config/cache': additional properties 'block_sizes'"),
        ("config.cache.block_size=0", "'/config/cache/block_size': minimum: got 0, want 1"),
        ("config.cache.gpu_memory_utilization=2", "maximum: got 2, want 1"),
        ("config.scheduler.policy=lifo", "value must be one of 'fcfs', 'priority'"),
        ("config.model.served_model_name=x", "got string, want array"),
        ("config.server.api_keys={a}", "additional properties 'api_keys' not allowed"),
        ("config.server.port=1", "additional properties 'port' not allowed"),
        ("workers.gpusPerNode=-1", "'/workers/gpusPerNode': minimum: got -1, want 0"),
        ("workers.sharedMemory=2GB", "'/workers/sharedMemory': '2GB' does not match"),
        ("wokers.gpusPerNode=1", "additional properties 'wokers' not allowed"),
        ("models.volume=hostPath", "'/models/hostPath': minLength: got 0, want 1"),
        ("models.readOnly=true", "'/models/download': value must be false"),
        ("upgrade.strategy=Rolling", "value must be one of 'NewCluster', 'None'"),
        ("image.digest=latest", "'/image/digest': 'latest' does not match"),
        ("httpRoute.enabled=true", "'/httpRoute/parentRefs': minItems: got 0, want 1"),
        ("networkPolicy.operator=null", "'/networkPolicy': missing property 'operator'"),
        (
            "workers.gpusPerNode=4,config.parallel.tensor_parallel_size=8",
            "a node has 4 GPUs (workers.gpusPerNode): tensor-parallel ranks share a node",
        ),
        ("auth.allowAnonymous=true,auth.apiKeys.values={a}", "remove one of the two"),
        ("ray.gcsFaultTolerance.backend=redis", "ray.gcsFaultTolerance.redis.address is missing"),
        ("autoscaling.enabled=true,autoscaling.minGroups=3", "below autoscaling.minGroups (3)"),
        ("fullnameOverride=9lives", "cannot be that of a service: begin with a letter"),
    ],
)
def test_wrong_values_are_refused_in_words(helm: Path, sets: str, words: str) -> None:
    with pytest.raises(RefusedError) as refused:
        Rendered.of(helm, None, sets=[sets])
    assert words in str(refused.value)


def test_subcharts_may_have_globals(helm: Path) -> None:
    Rendered.of(helm, None, sets=["global.anything=1"])


def test_without_its_keys_it_does_not_serve(rendered: Render) -> None:
    """A secret that is missing an entry must not open the service."""
    args = rendered("one-gpu").serve["applications"][0]["args"]
    with pytest.raises(ConfigError, match="there is no API key"):
        config_of(args, {})
    assert config_of(args, {"PALIMPSEST_API_KEYS": "k"}).server.host == "0.0.0.0"


def test_a_key_is_generated(helm: Path) -> None:
    keys = {Rendered.of(helm, None).only("Secret")["stringData"]["api-keys"] for _ in range(2)}
    assert len(keys) == 2
    assert all(len(key) > 40 for key in keys)


def test_notes_name_what_was_made(helm: Path) -> None:
    notes = run_helm(
        helm, "install", "demo", CHART, "--dry-run=client", "--values", values_file("everything")
    ).partition("NOTES:")[2]
    for words in (
        "wait rayservice/chat --for=condition=Ready",
        "port-forward service/chat-serve-svc 8000",
        "get secret chat ",
        "helm test demo",
        "through the Ingress at chat.example.org",
    ):
        assert words in notes
