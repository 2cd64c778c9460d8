"""The rules and the dashboard against the metrics that are exported."""

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.metrics_table import METRICS, PREFIX, Metric
from helm.alerts import rules
from helm.dashboard import dashboard
from tests.support import kubernetes_tools
from tests.support.chart import Rendered

_SELECTOR = re.compile(r"\b(palimpsest_\w+)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)=(~?)"([^"]*)"')
# Those of Prometheus itself, and of every metric.
_OTHER_LABELS = {"namespace", "model_name"}


def expressions() -> Iterator[str]:
    for group in rules()["groups"]:
        for rule in group["rules"]:
            yield rule["expr"]
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            yield target["expr"]


def exported() -> dict[str, Metric]:
    """Every series by its name."""
    suffixes = {"histogram": ("_bucket", "_sum", "_count")}
    return {
        f"{PREFIX}{metric.name}{suffix}": metric
        for metric in METRICS
        for suffix in suffixes.get(metric.kind, ("",))
    }


def test_every_metric_that_is_asked_for_is_exported() -> None:
    series = exported()
    asked = set()
    for expression in expressions():
        for name, matchers in _SELECTOR.findall(expression):
            assert name in series, (name, expression)
            asked.add(series[name].name)
            for label, is_pattern, value in _MATCHER.findall(matchers):
                if label in _OTHER_LABELS:
                    continue
                known = series[name].label
                assert known is not None, (name, label)
                assert label == known.name, (name, label)
                values = value.split("|") if is_pattern else [value]
                assert set(values) <= set(known.values), (name, value)
    # The pictures leave out few of them.
    assert len({metric.name for metric in METRICS} - asked) < 12


def test_labels_that_are_grouped_by_exist() -> None:
    series = exported()
    for expression in expressions():
        for labels, inner in re.findall(r"sum by \(([\w, ]+)\) \((.*?)\)", expression):
            names = [name for name, _ in _SELECTOR.findall(inner)]
            for label in {label.strip() for label in labels.split(",")} - _OTHER_LABELS - {"le"}:
                for name in names:
                    known = series[name].label
                    assert known is not None, (name, label)
                    assert label == known.name, (name, label)


@pytest.fixture(scope="module")
def promtool() -> Path:
    found = kubernetes_tools.promtool()
    if found is None:
        pytest.skip("there is no promtool on this machine, and no Debian to fetch it from")
    return found


def run(promtool: Path, *arguments: object) -> str:
    done = subprocess.run(
        [promtool, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_prometheus_takes_the_rules(
    promtool: Path, rendered: Callable[[str], Rendered], tmp_path: Path
) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump(rendered("everything").only("PrometheusRule")["spec"]))
    assert "SUCCESS: 12 rules found" in run(promtool, "check", "rules", file)


def test_alerts_fire_when_they_should(promtool: Path, tmp_path: Path) -> None:
    """Four histories of one model, and what is said of each."""
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump(rules()))
    stuck = {"requests_waiting{reason='new'}": "3x40", "requests_running": "0x40"}
    busy = {"requests_waiting{reason='new'}": "0x40", "requests_running": "9x40"}
    churning = busy | {
        "preemptions_total{cause='blocks'}": "0+60x40",
        "resume_cache_queries_total{cause='blocks'}": "0+1000x40",
    }
    histories = [
        (stuck, {"Stuck"}),
        (busy, set()),
        (churning | {"resume_cache_hits_total{cause='blocks'}": "0+100x40"}, {"PoolChurns"}),
        (churning | {"resume_cache_hits_total{cause='blocks'}": "0+900x40"}, {"PoolIsTight"}),
        (busy | {"preemptions_total{cause='worker_lost'}": "0x20 5x20"}, {"EngineInterrupted"}),
        (
            {
                "requests_waiting{reason='new'}": "0x40",
                "requests_running": "0x40",
                "kv_blocks{state='held'}": "7x40",
            },
            {"BlocksLeaked"},
        ),
    ]
    tests = tmp_path / "tests.yaml"
    tests.write_text(
        yaml.safe_dump(
            {
                "rule_files": [str(file)],
                "tests": [_unit_test(series, fired) for series, fired in histories],
            }
        )
    )
    run(promtool, "test", "rules", tests)


def _unit_test(series: dict[str, str], fired: set[str]) -> dict[str, Any]:
    """One sample a minute; looked at where every wait is over."""
    names = [
        rule["alert"] for group in rules()["groups"] for rule in group["rules"] if "alert" in rule
    ]
    return {
        "interval": "1m",
        "input_series": [
            {"series": _of_the_model(name), "values": values} for name, values in series.items()
        ],
        "promql_expr_test": [
            {
                "expr": f'count(ALERTS{{alertname="{name}", alertstate="firing"}}) or vector(0)',
                "eval_time": "33m",
                "exp_samples": [
                    {"labels": "{}", "value": int(name.removeprefix("Palimpsest") in fired)}
                ],
            }
            for name in names
        ],
    }


def _of_the_model(name: str) -> str:
    name, _, labels = name.removesuffix("}").partition("{")
    common = "namespace='models', model_name='m'"
    return f"{PREFIX}{name}{{{common}{', ' if labels else ''}{labels}}}"


def test_the_dashboard_is_one(rendered: Callable[[str], Rendered]) -> None:
    (config_map,) = rendered("everything").of_kind("ConfigMap")
    found = json.loads(config_map["data"]["palimpsest.json"])
    assert found == dashboard()
    assert len({panel["id"] for panel in found["panels"]}) == len(found["panels"])
    for panel in found["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
