"""The rules for Prometheus: what is recorded, and what somebody is told of."""

from typing import Any

BY = "by (namespace, model_name)"


def rules() -> dict[str, Any]:
    """The content of a file of rules, and of the `spec` of a PrometheusRule."""
    return {
        "groups": [
            {"name": "palimpsest.ratios", "rules": _RECORDED},
            {"name": "palimpsest.alerts", "rules": _ALERTS},
        ]
    }


def _ratio(record: str, part: str, whole: str) -> dict[str, Any]:
    return {
        "record": f"palimpsest:{record}:ratio_rate5m",
        "expr": f"sum {BY} (rate({part}[5m])) / sum {BY} (rate({whole}[5m]))",
    }


def _alert(
    name: str, expression: str, *, wait: str, severity: str, summary: str, action: str
) -> dict[str, Any]:
    return {
        "alert": f"Palimpsest{name}",
        "expr": expression,
        "for": wait,
        "labels": {"severity": severity},
        "annotations": {"summary": summary, "description": action},
    }


_RECORDED = [
    _ratio(
        "resume_cache_hits",
        "palimpsest_resume_cache_hits_total",
        "palimpsest_resume_cache_queries_total",
    ),
    _ratio(
        "prefix_cache_hits",
        "palimpsest_prefix_cache_hits_total",
        "palimpsest_prefix_cache_queries_total",
    ),
    _ratio(
        "recomputed_tokens",
        'palimpsest_scheduled_tokens_total{kind="recompute"}',
        "palimpsest_scheduled_tokens_total",
    ),
]

_RUNNING = f"sum {BY} (palimpsest_requests_running)"
_WAITING = f"sum {BY} (palimpsest_requests_waiting)"
_PREEMPTED = f'sum {BY} (rate(palimpsest_preemptions_total{{cause="blocks"}}[5m]))'

_ALERTS = [
    _alert(
        "Stuck",
        f"{_WAITING} > 0 and {_RUNNING} == 0",
        wait="1m",
        severity="critical",
        summary="Requests of {{ $labels.model_name }} wait and none runs.",
        action="Ask /ready for the reason: the engine is starting, recovering or has failed.",
    ),
    _alert(
        "BlocksLeaked",
        f'sum {BY} (palimpsest_kv_blocks{{state="held"}}) > 0 and {_RUNNING} == 0 '
        f"and {_WAITING} == 0",
        wait="5m",
        severity="warning",
        summary="{{ $labels.model_name }} is idle and holds {{ $value }} blocks of KV cache.",
        action="This is a fault of Palimpsest: report it with the scheduler's log.",
    ),
    _alert(
        "PoolChurns",
        f"{_PREEMPTED} > 0.1 and palimpsest:resume_cache_hits:ratio_rate5m < 0.5",
        wait="10m",
        severity="warning",
        summary="Preempted requests of {{ $labels.model_name }} lose their context: each one is "
        "prefilled anew.",
        action="More blocks (cache.gpu_memory_utilization, cache.kv_cache_dtype, more TP or PP "
        "ranks) or fewer holders (scheduler.max_num_seqs, scheduler.max_num_batched_tokens). "
        "palimpsest_kv_blocks_wanted says how many blocks would have done.",
    ),
    _alert(
        "PoolIsTight",
        f"{_PREEMPTED} > 0.1 and palimpsest:resume_cache_hits:ratio_rate5m >= 0.5",
        wait="30m",
        severity="info",
        summary="Requests of {{ $labels.model_name }} are preempted and recover "
        "({{ $value | humanize }} a second).",
        action="It shows as jitter of the latency. The remedy is that of PalimpsestPoolChurns.",
    ),
    _alert(
        "EngineInterrupted",
        f'sum {BY} (increase(palimpsest_preemptions_total{{cause=~"worker_lost|scheduler_lost"}}'
        "[15m])) > 0",
        wait="0m",
        severity="warning",
        summary="{{ $labels.model_name }} lost a worker or its scheduler; "
        "{{ $value | humanize }} requests were interrupted.",
        action="See what became of the pods: kubectl get events.",
    ),
    _alert(
        "RequestsFail",
        f'sum {BY} (rate(palimpsest_requests_total{{finish_reason="error"}}[5m])) > 0',
        wait="5m",
        severity="critical",
        summary="Requests of {{ $labels.model_name }} end in errors that are not their own.",
        action="The logs of the ingress replicas and of the scheduler say why.",
    ),
    _alert(
        "RequestsRefused",
        f"sum {BY} (rate(palimpsest_admission_rejections_total[5m])) > 0.1",
        wait="10m",
        severity="warning",
        summary="{{ $labels.model_name }} refuses {{ $value | humanize }} requests a second.",
        action="The label `reason` tells whether the queue is full or requests can never fit.",
    ),
    _alert(
        "FirstTokenSlow",
        "histogram_quantile(0.99, sum by (namespace, model_name, le) "
        "(rate(palimpsest_time_to_first_token_seconds_bucket[5m]))) > 30",
        wait="15m",
        severity="warning",
        summary="One request in a hundred to {{ $labels.model_name }} waits longer than 30 s for "
        "its first token.",
        action="Compare palimpsest_request_queue_seconds: if requests queue, capacity is short.",
    ),
    _alert(
        "Silent",
        "absent(palimpsest_requests_running)",
        wait="10m",
        severity="critical",
        summary="Nobody reports Palimpsest's metrics.",
        action="Either the service is gone or Prometheus may not reach port 8000 of the head.",
    ),
]
