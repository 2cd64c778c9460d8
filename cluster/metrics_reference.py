"""The page docs/metrics.md, made from the table of all metrics.

python -m cluster.metrics_reference > docs/metrics.md
"""

import sys
from collections.abc import Iterator

from cluster.metrics_table import (
    CONFIG_INFO,
    CONFIG_INFO_LABELS,
    CONFIG_INFO_MEANING,
    METRICS,
    PREFIX,
    Metric,
)

INTRODUCTION = f"""\
# Metrics

<!-- Made by `python -m cluster.metrics_reference`. Change cluster/metrics_table.py, or the texts
in cluster/metrics_reference.py. -->

`GET /metrics` is for Prometheus, and needs no key. All names begin with `{PREFIX}`, all metrics
carry the label `model_name`, and units stand in the names.

**Whichever replica is asked**, the answer is the sum over all of them. Every replica counts up from
zero and tells the scheduler twice a second; a scrape asks the scheduler anew. So the part of the
other replicas is at most a second old, what a dead replica has counted stays, a new scheduler
learns from the replicas what the last one knew, and no counter falls. While there is no scheduler,
the counters stand still and the gauges of `load` and `pool` are absent.

**Who counts what.** Tokens and outcomes are counted where they are handed to the client, and agree
with the `usage` and the finish reasons that clients are told. Latencies are those of the server:
from the arrival of the request until a piece of text is ready to be sent.

**Dashboards made for vLLM** work with `palimpsest serve --metrics-compat vllm`, which is the
setting `server.metrics_compat`: `/metrics` then also has the names in the last column, behind
`vllm:`.
"""

READING = """\
## How to read them

**What did the preemptions cost?** Their number says that something happened, not what it cost. Read
it with the hit ratio of the resumes:

```
# the share of what resumes looked up that was still there
  sum(rate(palimpsest_resume_cache_hits_total[5m]))
/ sum(rate(palimpsest_resume_cache_queries_total[5m]))

# the share of all work that was done twice
  sum(rate(palimpsest_scheduled_tokens_total{kind="recompute"}[5m]))
/ sum(rate(palimpsest_scheduled_tokens_total[5m]))
```

| preemptions | found again | meaning |
|---|---|---|
| rise | most | requests bounce and recover: clients see jitter in `inter_token_latency_seconds` |
| rise | ever fewer | the pool churns, and each preemption is a real prefill |

Act on capacity: more blocks (`cache.gpu_memory_utilization`, a smaller `cache.kv_cache_dtype`, more
workers) or fewer holders (`scheduler.max_num_seqs`, `scheduler.max_num_batched_tokens`).
`kv_blocks_wanted` is the size of the pool that would have been enough.

**Who was hit?** `request_preemptions` tells everyone once from one request ten times, and
`preemption_stall_seconds` how long the pauses were. Where preempted requests keep coming back,
`requests_waiting{reason="preempted"}` stays above zero.

**Is the cache full, or warm?** `kv_cache_usage_ratio` of 0 is both an empty cache and one full of
evictable blocks: look at `kv_blocks{state="evictable"}`. When
`kv_block_idle_before_evict_seconds` is short, blocks are lost before anyone can come back to them.

**The bill adds up.** For every cause, held = recovered + recomputed + dropped + what those held
that still wait.

**Faults.** Requests waiting and none running for half a minute is one. No request and
`kv_blocks{state="held"}` above zero is a leak. `requests_total{finish_reason="error"}` counts
faults of the server's own.

**Alerts to begin with:**

```
sum(palimpsest_requests_waiting) > 0 and sum(palimpsest_requests_running) == 0   # for 30s
rate(palimpsest_admission_rejections_total{reason="queue_full"}[5m]) > 0
histogram_quantile(0.99, rate(palimpsest_time_to_first_token_seconds_bucket[5m])) > 5
```
"""


def markdown() -> str:
    """The whole page."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield INTRODUCTION
    yield "## All metrics"
    group = ""
    for metric in METRICS:
        if metric.group != group:
            group = metric.group
            yield f"\n**{group.capitalize()}**\n"
            yield "| metric | kind | meaning | vLLM |"
            yield "|---|---|---|---|"
        yield _row(metric)
    yield "\n**Configuration**\n"
    yield "| metric | kind | meaning | vLLM |"
    yield "|---|---|---|---|"
    labels = ", ".join(CONFIG_INFO_LABELS)
    yield f"| `{CONFIG_INFO}{{{labels}}}` | gauge | {CONFIG_INFO_MEANING} | `{CONFIG_INFO}` |"
    yield ""
    yield READING


def _row(metric: Metric) -> str:
    name = metric.name
    if metric.label is not None:
        name += f"{{{metric.label.name}: {', '.join(metric.label.values)}}}"
    vllm = f"`{metric.vllm_name}`" if metric.vllm_name else ""
    return f"| `{name}` | {metric.kind} | {metric.meaning} | {vllm} |"


if __name__ == "__main__":
    sys.stdout.write(markdown())
