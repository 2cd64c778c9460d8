"""What the scheduler counts, under the names that it is exported by."""

from collections.abc import Mapping

from scheduler.accounting import Accounting
from scheduler.core import SchedulerCore
from scheduler.histogram import Histogram
from scheduler.messages import Counts, Gauges, HistogramCounts, InterruptionCause


def counts_of(
    accounting: Accounting, step_seconds: Mapping[str, Histogram], version: int
) -> Counts:
    """All counts since the scheduler began; `step_seconds` by the part of the step."""
    evictions = accounting.evictions
    return Counts(
        version,
        {
            "kv_evictions_total": {"": evictions.count},
            "prefix_cache_queries_total": {"": accounting.queries_tokens},
            "prefix_cache_hits_total": {"": accounting.hits_tokens},
            "scheduled_tokens_total": {
                "prompt": accounting.scheduled_tokens.prompt,
                "output": accounting.scheduled_tokens.output,
                "recompute": accounting.scheduled_tokens.recompute,
            },
            "requests_total": {"abort": accounting.orphaned_requests},
            **_interruptions(accounting),
        },
        {
            "kv_block_lifetime_seconds": {"": frozen(evictions.lifetime_seconds)},
            "kv_block_idle_before_evict_seconds": {"": frozen(evictions.idle_seconds)},
            "request_preemptions": {"": frozen(accounting.request_preemptions)},
            "request_queue_seconds": {"": frozen(accounting.queue_seconds)},
            "preemption_stall_seconds": {
                str(cause): frozen(totals.stall_seconds)
                for cause, totals in accounting.by_cause.items()
            },
            "step_seconds": {part: frozen(seconds) for part, seconds in step_seconds.items()},
        },
    )


def _interruptions(accounting: Accounting) -> dict[str, dict[str, int]]:
    """Counters by cause."""
    counters: dict[str, dict[InterruptionCause, int]] = {}
    for cause, totals in accounting.by_cause.items():
        for name, value in (
            ("preemptions_total", totals.preemptions),
            ("preempted_tokens_held_total", totals.held_tokens),
            ("preempted_tokens_recovered_total", totals.recovered_tokens),
            ("preempted_tokens_recomputed_total", totals.recomputed_tokens),
            ("preempted_tokens_dropped_total", totals.dropped_tokens),
            ("resume_cache_queries_total", totals.resume_queries_tokens),
            ("resume_cache_hits_total", totals.resume_hits_tokens),
            ("requests_resumed_total", totals.resumed_requests),
        ):
            counters.setdefault(name, {})[cause] = value
    return {name: {str(c): n for c, n in by_cause.items()} for name, by_cause in counters.items()}


def gauges_of(core: SchedulerCore, now: float) -> Gauges:
    pool, waiting = core.group.pool, core.waiting
    return Gauges(
        running_requests=len(core.group.running),
        waiting_new_requests=len(waiting) - waiting.num_interrupted,
        waiting_preempted_requests=waiting.num_interrupted,
        held_blocks=pool.num_held,
        evictable_blocks=pool.num_evictable,
        scratch_blocks=pool.num_scratch,
        wanted_blocks=core.accounting.demand.num_blocks(now),
        epoch=core.group.epoch,
    )


def frozen(histogram: Histogram) -> HistogramCounts:
    return HistogramCounts(tuple(histogram.bucket_counts), histogram.sum)
