"""The chart, rendered: what Helm would install."""

import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from helm.generate import CHART

CASES = sorted(path.name.removesuffix("-values.yaml") for path in (CHART / "ci").iterdir())
RELEASE, NAMESPACE = "demo", "models"
SERVE_PORT = 8000

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def values_file(case: str) -> Path:
    return CHART / "ci" / f"{case}-values.yaml"


class RefusedError(Exception):
    """Helm's words on values that it does not take."""


def run_helm(helm: Path, *arguments: object) -> str:
    """Raises RefusedError."""
    done = subprocess.run([helm, *map(str, arguments)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RefusedError(done.stdout + done.stderr)
    return done.stdout


@dataclass(frozen=True)
class Rendered:
    """The manifests of one release."""

    values: dict[str, Any]
    """The chart's own, with those of the case over them."""
    text: str

    @classmethod
    def of(
        cls, helm: Path, case: str | None, *, sets: Sequence[str] = (), chart: Path = CHART
    ) -> "Rendered":
        """Raises RefusedError. With `sets`, `values` do not tell of them."""
        own = yaml.load((chart / "values.yaml").read_text(), _Loader)
        command: list[object] = ["template", RELEASE, chart, "--namespace", NAMESPACE]
        given: dict[str, Any] = {}
        if case is not None:
            given = yaml.load(values_file(case).read_text(), _Loader)
            command += ["--values", values_file(case)]
        for one in sets:
            command += ["--set", one]
        return cls(_merged(own, given), run_helm(helm, *command))

    @cached_property
    def manifests(self) -> list[dict[str, Any]]:
        return [manifest for manifest in yaml.load_all(self.text, _Loader) if manifest]

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [manifest for manifest in self.manifests if manifest["kind"] == kind]

    def only(self, kind: str) -> dict[str, Any]:
        (manifest,) = self.of_kind(kind)
        return manifest

    @cached_property
    def cluster(self) -> dict[str, Any]:
        found: dict[str, Any] = self.only("RayService")["spec"]["rayClusterConfig"]
        return found

    @cached_property
    def head(self) -> dict[str, Any]:
        group: dict[str, Any] = self.cluster["headGroupSpec"]
        return group

    @cached_property
    def workers(self) -> dict[str, Any]:
        (group,) = self.cluster["workerGroupSpecs"]
        return dict(group)

    @property
    def groups(self) -> list[dict[str, Any]]:
        return [self.head, self.workers]

    @cached_property
    def serve(self) -> dict[str, Any]:
        """What `serve deploy` would read."""
        text = self.only("RayService")["spec"]["serveConfigV2"]
        found: dict[str, Any] = yaml.load(text, _Loader)
        return found

    @property
    def pod_specs(self) -> Iterator[dict[str, Any]]:
        for group in self.groups:
            yield group["template"]["spec"]
        yield self.only("Pod")["spec"]

    @property
    def containers(self) -> Iterator[dict[str, Any]]:
        for spec in self.pod_specs:
            yield from spec.get("initContainers", [])
            yield from spec["containers"]


Check = Callable[[Rendered], None]
"""Raises AssertionError for what does not hold."""


def ray_container(group: dict[str, Any]) -> dict[str, Any]:
    """KubeRay takes the first one for Ray's."""
    found: dict[str, Any] = group["template"]["spec"]["containers"][0]
    return found


def environment(container: dict[str, Any]) -> dict[str, str]:
    """The variables that are written down, without those from secrets."""
    return {one["name"]: one["value"] for one in container.get("env", []) if "value" in one}


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for key, value in above.items():
        if isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = _merged(result[key], value)
        else:
            result[key] = value
    return result
