"""Every metric there is: its name, its kind, its label, and what it means.

What is exported, and the page docs/metrics.md, are made from this table.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cluster.metrics_counts import ERROR_STATUSES, FINISH_REASONS, REFUSALS
from scheduler.histogram import COUNTS, SECONDS, STEP_SECONDS, TOKENS
from scheduler.messages import InterruptionCause

PREFIX = "palimpsest_"

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Label:
    name: str
    values: Sequence[str]
    """All there are: a counter is there from the start, at 0, for each."""


@dataclass(frozen=True, slots=True)
class Metric:
    """Without `PREFIX`. A counter's name ends in `_total`, and each has its unit in its name."""

    group: str
    kind: Kind
    name: str
    meaning: str
    label: Label | None = None
    bounds: Sequence[float] = ()
    """Upper bounds of a histogram's buckets."""
    vllm_name: str = ""
    """What vLLM calls it; empty: it has none of this meaning."""
    vllm_label: str = ""
    """Of that; empty: the values of our label are added up."""

    @property
    def label_values(self) -> Sequence[str]:
        return self.label.values if self.label is not None else ("",)


_CAUSE = Label("cause", tuple(InterruptionCause))
_FINISH = Label("finish_reason", FINISH_REASONS)

METRICS = (
    Metric(
        "load", "gauge", "requests_running", "Requests that hold blocks.",
        vllm_name="num_requests_running",
    ),
    Metric(
        "load", "gauge", "requests_waiting",
        "Requests in the queue: those that have not run yet, and those that were preempted.",
        Label("reason", ("new", "preempted")),
        vllm_name="num_requests_waiting",
    ),
    Metric(
        "pool", "gauge", "kv_blocks",
        "Blocks of KV cache by what is in them; they sum to all that can be used. Evictable ones "
        "are free and still a hit, which tells a warm idle cache from a cold one.",
        Label("state", ("held", "evictable", "scratch")),
    ),
    Metric(
        "pool", "gauge", "kv_cache_usage_ratio", "Held blocks as a share of all, 0 to 1.",
        vllm_name="kv_cache_usage_perc",
    ),
    Metric(
        "pool", "gauge", "kv_blocks_wanted",
        "The size of the pool that would have avoided the preemptions of the last five minutes; "
        "0 without any.",
    ),
    Metric(
        "pool", "counter", "kv_evictions_total",
        "Blocks whose cached content was lost because their memory was needed.",
    ),
    Metric(
        "pool", "histogram", "kv_block_lifetime_seconds",
        "From the filling of a block to its eviction; one block in 64.", bounds=SECONDS,
    ),
    Metric(
        "pool", "histogram", "kv_block_idle_before_evict_seconds",
        "From the last use of a block to its eviction; one block in 64.", bounds=SECONDS,
    ),
    Metric(
        "prefix", "counter", "prefix_cache_queries_total",
        "Tokens looked up at first admissions.", vllm_name="prefix_cache_queries_total",
    ),
    Metric(
        "prefix", "counter", "prefix_cache_hits_total", "Those of them that were found.",
        vllm_name="prefix_cache_hits_total",
    ),
    Metric(
        "prefix", "counter", "resume_cache_queries_total",
        "Tokens looked up when a preempted request was admitted again.", _CAUSE,
    ),
    Metric(
        "prefix", "counter", "resume_cache_hits_total", "Those of them that were found.", _CAUSE
    ),
    Metric(
        "interruption", "counter", "preemptions_total",
        "How often a running request lost its blocks.", _CAUSE,
        vllm_name="num_preemptions_total",
    ),
    Metric(
        "interruption", "counter", "preempted_tokens_held_total",
        "Computed tokens that preempted requests lost: recovered + recomputed + dropped + those "
        "of requests that still wait.", _CAUSE,
    ),
    Metric(
        "interruption", "counter", "preempted_tokens_recovered_total",
        "Those found again in the cache.", _CAUSE,
    ),
    Metric(
        "interruption", "counter", "preempted_tokens_recomputed_total",
        "Those computed again.", _CAUSE,
    ),
    Metric(
        "interruption", "counter", "preempted_tokens_dropped_total",
        "Those of requests that ended before they could go on.", _CAUSE,
    ),
    Metric(
        "interruption", "histogram", "preemption_stall_seconds",
        "From a preemption to the next token of the request.", _CAUSE, SECONDS,
    ),
    Metric(
        "interruption", "histogram", "request_preemptions",
        "How often one request was preempted, when it ended: everyone once, or one ten times.",
        bounds=COUNTS,
    ),
    Metric(
        "work", "counter", "scheduled_tokens_total",
        "Tokens that steps computed. The recompute tax is recompute / all.",
        Label("kind", ("prompt", "output", "recompute")),
    ),
    Metric(
        "work", "counter", "prompt_tokens_total",
        "Prompt tokens of accepted requests, as in `usage`.", vllm_name="prompt_tokens_total",
    ),
    Metric(
        "work", "counter", "generation_tokens_total",
        "Output tokens that clients were given, as in `usage`.",
        vllm_name="generation_tokens_total",
    ),
    Metric(
        "work", "histogram", "step_seconds",
        "Parts of a step: planning and publishing, executing in the workers, applying the result.",
        Label("part", ("plan", "execute", "apply")), STEP_SECONDS,
    ),
    Metric(
        "latency", "histogram", "time_to_first_token_seconds",
        "From the arrival of a request to its first token ever; tokenizing and waiting included.",
        bounds=SECONDS, vllm_name="time_to_first_token_seconds",
    ),
    Metric(
        "latency", "histogram", "inter_token_latency_seconds",
        "From one token of a choice to its next; a stall is in it.",
        bounds=SECONDS, vllm_name="inter_token_latency_seconds",
    ),
    Metric(
        "latency", "histogram", "e2e_request_latency_seconds",
        "From the arrival of a request to the last token of a choice that ended with stop or "
        "length.", bounds=SECONDS, vllm_name="e2e_request_latency_seconds",
    ),
    Metric(
        "latency", "histogram", "request_queue_seconds",
        "From reaching the scheduler to the first admission.",
        bounds=SECONDS, vllm_name="request_queue_time_seconds",
    ),
    Metric(
        "outcome", "counter", "requests_total",
        "Choices that have ended, by the finish reason that their client was told. A client that "
        "leaves is an abort; error is our fault.", _FINISH,
        vllm_name="request_success_total", vllm_label="finished_reason",
    ),
    Metric(
        "outcome", "histogram", "request_prompt_tokens", "Prompt lengths of ended choices.",
        _FINISH, TOKENS, vllm_name="request_prompt_tokens",
    ),
    Metric(
        "outcome", "histogram", "request_generation_tokens", "Output lengths of ended choices.",
        _FINISH, TOKENS, vllm_name="request_generation_tokens",
    ),
    Metric(
        "outcome", "counter", "admission_rejections_total",
        "Requests that were not accepted: a prompt that the model (`bad_request`) or the pool can "
        "never hold, a full queue, the share of one API key used up, an engine that takes none. "
        "Other mistakes in a request are errors 400 alone.",
        Label("reason", REFUSALS),
    ),
    Metric(
        "outcome", "counter", "http_errors_total",
        "Requests that were answered with an error, by its HTTP status: 400 for a wrong request, "
        "401 for a wrong key, and so on. Not counted: probes, and errors in a stream that had "
        "begun.",
        Label("status", tuple(map(str, ERROR_STATUSES))),
    ),
    Metric(
        "faults", "counter", "worker_restarts_total",
        "Worker processes that took the place of one that died, failed or hung.",
    ),
    Metric(
        "faults", "histogram", "recovery_seconds",
        "From the moment in which a death was noticed until the next group had formed.",
        bounds=SECONDS,
    ),
    Metric(
        "faults", "counter", "requests_resumed_total",
        "How often an interrupted request was admitted again.", _CAUSE,
    ),
    Metric(
        "faults", "gauge", "epoch",
        "Of the worker group; it rises with every loss, and every attempt to form another.",
    ),
)  # fmt: skip
"""All but `CONFIG_INFO`."""

CONFIG_INFO = "cache_config_info"
CONFIG_INFO_LABELS = ("block_size", "num_blocks", "token_capacity", "max_concurrency")
CONFIG_INFO_MEANING = (
    "Always 1; its labels are the sizes of the KV cache: tokens in a block, blocks with the null "
    "block, tokens that all requests together can hold, and how many requests of the full context "
    "length that is."
)
