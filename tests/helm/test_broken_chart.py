"""The checks find what is broken: the templates, each time with one mistake made on purpose."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from helm.generate import CHART
from tests.support import chart_checks, chart_surroundings
from tests.support.chart import CASES, RefusedError, Rendered

CHECKS = chart_checks.CHECKS + chart_surroundings.CHECKS


@dataclass(frozen=True, slots=True)
class Mistake:
    name: str
    file: str
    right: str
    wrong: str


MISTAKES = (
    Mistake(
        "a budget's selector",
        "poddisruptionbudget.yaml",
        "app.kubernetes.io/component: {{ $component }}",
        "app.kubernetes.io/component: {{ $group }}",
    ),
    Mistake("a port's name", "podmonitor.yaml", "port: serve", "port: http"),
    Mistake("a secret's key", "_pods.tpl", "key: api-keys", "key: apiKeys"),
    Mistake("no shared memory", "_pods.tpl", "- {name: shm, mountPath: /dev/shm}\n", ""),
    Mistake("half the GPUs", "rayservice.yaml", "(int $shape.gpus)", "(div $shape.gpus 2)"),
    Mistake("the probe's path", "rayservice.yaml", "/-/healthz", "/healthz"),
    Mistake("one pod too few", "_helpers.tpl", "(sub $stages 1)", "0"),
    Mistake("a head that works", "rayservice.yaml", 'num-cpus: "0"', 'num-cpus: "4"'),
    Mistake(
        "pods that end before their requests",
        "rayservice.yaml",
        "terminationGracePeriodSeconds: {{ add $drain 30 }}",
        "terminationGracePeriodSeconds: 30",
    ),
    Mistake("a closed port", "networkpolicy.yaml", "endPort: 6383", "endPort: 6382"),
    Mistake("another service", "ingress.yaml", "-serve-svc", "-svc"),
    Mistake("the wrong device", "_helpers.tpl", '"device" $device', '"device" "cpu"'),
    Mistake("nowhere to write", "_pods.tpl", "- {name: tmp, mountPath: /tmp}\n", ""),
    Mistake(
        "a key in the open",
        "rayservice.yaml",
        "name: ray-head\n",
        "name: ray-head\n              args: [{{ .Values.auth.adminKey.value | quote }}]\n",
    ),
    Mistake("settings lost", "_helpers.tpl", "deepCopy .Values.config", "dict"),
)


def complaints(helm: Path, chart: Path) -> Iterator[str]:
    """What is found in a chart, as the name of the case and of the check."""
    for case in CASES:
        try:
            rendered = Rendered.of(helm, case, chart=chart)
        except RefusedError:
            yield f"{case}: it cannot be rendered"
            continue
        for check in CHECKS:
            try:
                check(rendered)
            except (AssertionError, KeyError, ValueError):
                yield f"{case}: {check.__name__}"


def test_a_chart_without_mistakes_has_none(helm: Path) -> None:
    assert list(complaints(helm, CHART)) == []


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_mistakes_are_found(helm: Path, tmp_path: Path, mistake: Mistake) -> None:
    chart = Path(shutil.copytree(CHART, tmp_path / "palimpsest"))
    template = chart / "templates" / mistake.file
    text = template.read_text()
    assert mistake.right in text
    template.write_text(text.replace(mistake.right, mistake.wrong))
    assert list(complaints(helm, chart))
