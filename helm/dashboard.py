"""The dashboard for Grafana: rows of panels, in the order in which an operator asks."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

_COLUMNS, _HEIGHT = 24, 8
_WHERE = 'namespace=~"$namespace", model_name=~"$model"'
_SCHEDULED = "palimpsest_scheduled_tokens_total"
_STEP = "palimpsest_step_seconds"
_SOURCE = {"type": "prometheus", "uid": "${source}"}


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    description: str
    unit: str
    """Of Grafana: short, s, percentunit, reqps."""
    queries: Sequence[tuple[str, str]]
    """PromQL and legend."""


def _rate(metric: str, label: str = "", where: str = "") -> str:
    where = f"{_WHERE}, {where}" if where else _WHERE
    by = f"by ({label}) " if label else ""
    return f"sum {by}(rate({metric}{{{where}}}[$__rate_interval]))"


def _sum(metric: str, label: str = "") -> str:
    by = f"by ({label}) " if label else ""
    return f"sum {by}({metric}{{{_WHERE}}})"


def _ratio(part: str, whole: str, where: str = "") -> str:
    return f"{_rate(part, where=where)} / {_rate(whole)}"


def _quantiles(metric: str) -> list[tuple[str, str]]:
    buckets = f"sum by (le) (rate({metric}_bucket{{{_WHERE}}}[$__rate_interval]))"
    return [
        (f"histogram_quantile({quantile}, {buckets})", f"p{round(quantile * 100)}")
        for quantile in (0.5, 0.9, 0.99)
    ]


ROWS: dict[str, list[Panel]] = {
    "Is it well?": [
        Panel(
            "Requests",
            "Waiting with none running is a fault.",
            "short",
            [
                (_sum("palimpsest_requests_running"), "running"),
                (_sum("palimpsest_requests_waiting", "reason"), "waiting, {{reason}}"),
            ],
        ),
        Panel(
            "How requests end",
            "A client that leaves is an abort; error is our fault.",
            "reqps",
            [
                (_rate("palimpsest_requests_total", "finish_reason"), "{{finish_reason}}"),
                (_rate("palimpsest_admission_rejections_total", "reason"), "refused: {{reason}}"),
                (_rate("palimpsest_http_errors_total", "status"), "answered with {{status}}"),
            ],
        ),
        Panel(
            "Tokens per second",
            "Recomputed tokens are work done twice.",
            "short",
            [(_rate(_SCHEDULED, "kind"), "{{kind}}")],
        ),
    ],
    "Latency": [
        Panel("Time to first token", "", "s", _quantiles("palimpsest_time_to_first_token_seconds")),
        Panel(
            "Between tokens",
            "A stall is in it.",
            "s",
            _quantiles("palimpsest_inter_token_latency_seconds"),
        ),
        Panel("Whole request", "", "s", _quantiles("palimpsest_e2e_request_latency_seconds")),
        Panel("In the queue", "", "s", _quantiles("palimpsest_request_queue_seconds")),
    ],
    "The pool of KV blocks": [
        Panel(
            "Blocks",
            "Evictable blocks are free and still a hit: many of them are a warm cache, not a leak.",
            "short",
            [
                (_sum("palimpsest_kv_blocks", "state"), "{{state}}"),
                (_sum("palimpsest_kv_blocks_wanted"), "wanted"),
            ],
        ),
        Panel(
            "Usage",
            "Held blocks as a share of all.",
            "percentunit",
            [(f"max(palimpsest_kv_cache_usage_ratio{{{_WHERE}}})", "held")],
        ),
        Panel(
            "Hit ratio",
            "Preemptions up and resumes steady: requests bounce and recover. Resumes down: each "
            "preemption is a prefill.",
            "percentunit",
            [
                (
                    _ratio(
                        f"palimpsest_{lookup}_cache_hits_total",
                        f"palimpsest_{lookup}_cache_queries_total",
                    ),
                    legend,
                )
                for lookup, legend in (("prefix", "first admissions"), ("resume", "resumes"))
            ],
        ),
        Panel(
            "Evictions",
            "Blocks whose content was lost because their memory was needed.",
            "short",
            [(_rate("palimpsest_kv_evictions_total"), "blocks a second")],
        ),
    ],
    "What interruptions cost": [
        Panel(
            "Preemptions",
            "By cause. A lost worker is one too.",
            "short",
            [(_rate("palimpsest_preemptions_total", "cause"), "{{cause}}")],
        ),
        Panel(
            "The bill, in tokens",
            "What preempted requests held, and what became of it.",
            "short",
            [
                (_rate(f"palimpsest_preempted_tokens_{what}_total"), what)
                for what in ("held", "recovered", "recomputed", "dropped")
            ],
        ),
        Panel(
            "Recompute tax",
            "Work done twice as a share of all.",
            "percentunit",
            [
                (_ratio(_SCHEDULED, _SCHEDULED, 'kind="recompute"'), "recomputed"),
            ],
        ),
        Panel(
            "Stall",
            "From a preemption to the next token.",
            "s",
            _quantiles("palimpsest_preemption_stall_seconds"),
        ),
    ],
    "Steps": [
        Panel(
            "Parts of a step, mean",
            "",
            "s",
            [(f"{_rate(f'{_STEP}_sum', 'part')} / {_rate(f'{_STEP}_count', 'part')}", "{{part}}")],
        ),
    ],
}


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    ids = count(1)
    panels: list[dict[str, Any]] = []
    for row, (title, contents) in enumerate(ROWS.items()):
        top = row * (_HEIGHT + 1)
        place = {"x": 0, "y": top, "w": _COLUMNS, "h": 1}
        panels.append({"id": next(ids), "type": "row", "title": title, "gridPos": place})
        width = _COLUMNS // len(contents)
        for column, panel in enumerate(contents):
            place = {"x": column * width, "y": top + 1, "w": width, "h": _HEIGHT}
            panels.append(_panel(next(ids), panel, place))
    return {
        "title": "Palimpsest",
        "uid": "palimpsest",
        "tags": ["palimpsest"],
        "schemaVersion": 39,
        "editable": True,
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "30s",
        "templating": {"list": _variables()},
        "panels": panels,
    }


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "gridPos": place,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"tooltip": {"mode": "multi"}, "legend": {"displayMode": "list"}},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": expression, "legendFormat": legend}
            for index, (expression, legend) in enumerate(panel.queries)
        ],
    }


def _variables() -> list[dict[str, Any]]:
    return [
        {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
        *(
            {
                "name": name,
                "type": "query",
                "datasource": _SOURCE,
                "query": f"label_values(palimpsest_requests_running, {label})",
                "multi": True,
                "includeAll": True,
                "refresh": 2,
            }
            for name, label in (("namespace", "namespace"), ("model", "model_name"))
        ),
    ]
