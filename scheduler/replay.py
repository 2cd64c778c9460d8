"""Replays a recorded workload through the real core and compares every decision.

A recording (`workload`, `trace`, `finished_steps`, `totals`) holds what a scheduler decided
step by step with a fake model whose next token is a formula. Only the decisions that a client
or a worker could notice are in it: who computes how much, in which blocks, who is preempted,
and who stands where in which queue.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from configs import CacheConfig, Config, SchedulerConfig, resolve
from scheduler.core import SchedulerCore
from scheduler.messages import (
    Accepted,
    Close,
    CloseReason,
    Extend,
    Open,
    SamplingParams,
    SeqOutput,
    StepPlan,
    StepResult,
    SubmitRequest,
    pack_token_ids,
)

Json = dict[str, Any]

_MAX_STEPS = 1_000_000


@dataclass(frozen=True, slots=True)
class Difference:
    """The first decision that differs. `step` is None for a total."""

    step: int | None
    field: str
    expected: object
    got: object

    def __str__(self) -> str:
        where = "total" if self.step is None else f"step {self.step}"
        return f"{where}, {self.field}: expected {self.expected}, got {self.got}"


class RecordingError(ValueError):
    """A recording that cannot be replayed, and why."""


class _Request(msgspec.Struct, frozen=True):
    id: str
    arrival_step: Annotated[int, Meta(ge=0)]
    prompt: list[Annotated[int, Meta(ge=0, lt=2**31)]]
    max_tokens: int
    tok_seed: int
    priority: int = 0
    cache_salt: str | None = None


class _Workload(msgspec.Struct, frozen=True):
    """`num_blocks` counts the null block."""

    requests: list[_Request]
    block_size: Annotated[int, Meta(ge=1, le=1024)]
    num_blocks: Annotated[int, Meta(ge=2)]
    max_num_seqs: Annotated[int, Meta(ge=1)]
    max_num_batched_tokens: Annotated[int, Meta(ge=1)]
    max_model_len: Annotated[int, Meta(ge=2)]
    policy: Literal["fcfs", "priority"] = "fcfs"
    caching: bool = True
    chunked_prefill: bool = True
    long_prefill_token_threshold: Annotated[int, Meta(ge=0)] = 0


class _ToReplay(msgspec.Struct, frozen=True):
    workload: _Workload


class _ToCompare(_ToReplay, frozen=True):
    trace: list[Json]
    totals: dict[str, int]
    steps: int | None = None
    finished_steps: dict[str, int] | None = None


_S = TypeVar("_S", bound=msgspec.Struct)


def _checked(recording: Json, kind: type[_S]) -> _S:
    try:
        return msgspec.convert(recording, kind)
    except msgspec.ValidationError as error:
        raise RecordingError(f"not in the format of a recording: {error}") from None


def first_difference(recording: Json) -> Difference | None:
    """Replay the workload of `recording` and compare; None: every decision is the same."""
    recorded = _checked(recording, _ToCompare)
    ours = _Replay(recorded.workload).run()
    for step, (record, our_record) in enumerate(zip(recorded.trace, ours["trace"], strict=False)):
        for field, expected in record.items():
            got = our_record.get(field)
            if expected != got:
                return Difference(step, field, expected, got)
    comparisons: list[tuple[str, object, object]] = [
        ("steps", len(recorded.trace), ours["steps"]),
        *((name, value, ours["totals"].get(name)) for name, value in recorded.totals.items()),
    ]
    for field in ("steps", "finished_steps"):
        expected = getattr(recorded, field)
        if expected is not None:
            comparisons.append((field, expected, ours[field]))
    for field, expected, got in comparisons:
        if expected != got:
            return Difference(None, field, expected, got)
    return None


def replay(recording: Json) -> Json:
    """Our own decisions on the workload of `recording`, in the same format."""
    return _Replay(_checked(recording, _ToReplay).workload).run()


class _Replay:
    def __init__(self, workload: _Workload) -> None:
        self._requests: dict[str, _Request] = {}
        self._arrivals: dict[int, list[_Request]] = {}
        for request in workload.requests:
            if request.id in self._requests:
                raise RecordingError(f"request {request.id} is in the workload twice")
            self._requests[request.id] = request
            self._arrivals.setdefault(request.arrival_step, []).append(request)
        self._policy = workload.policy
        self._core = _core_for(workload)
        self._num_submitted = 0
        self._trace: list[Json] = []
        self._finished_steps: dict[str, int] = {}

    def run(self) -> Json:
        core, step = self._core, 0
        last_arrival = max(self._arrivals, default=0)
        while core.requests or step <= last_arrival:
            if step > _MAX_STEPS:
                raise RecordingError(f"the workload does not end within {_MAX_STEPS} steps")
            for request in self._arrivals.get(step, ()):
                self._submit(request)
            plan = core.plan(now=float(step))
            self._trace.append(self._record(step, plan))
            if plan is not None:
                core.apply(self._answer(plan), now=float(step))
            for batch in core.take_batches().values():
                for delta in batch.deltas:
                    if delta.finish is not None:
                        self._finished_steps[delta.request_id] = step
            step += 1
        return {
            "steps": step,
            "trace": self._trace,
            "finished_steps": self._finished_steps,
            "totals": self._totals(),
        }

    def _submit(self, request: _Request) -> None:
        message = SubmitRequest(
            request_id=request.id,
            client_id="replay",
            prompt_token_ids=pack_token_ids(request.prompt),
            sampling=SamplingParams(max_tokens=request.max_tokens, seed=0),
            arrival_seconds=float(self._num_submitted),
            priority=request.priority if self._policy == "priority" else 0,
            cache_salt=request.cache_salt or "",
        )
        self._num_submitted += 1
        answer = self._core.submit([message], now=0.0)
        if not isinstance(answer, Accepted):
            raise RecordingError(f"request {request.id} is refused: {answer.message}")

    def _answer(self, plan: StepPlan) -> StepResult:
        outputs = [
            SeqOutput(work.seq, (self._next_token(work.seq.request_id),))
            for work in plan.work
            if work.sample
        ]
        return StepResult(plan.epoch, plan.step_id, tuple(outputs))

    def _next_token(self, request_id: str) -> int:
        num_tokens = self._core.requests[request_id].num_tokens
        seed = self._requests[request_id].tok_seed
        return (seed * 1000003 + num_tokens * 7919) % 40000 + 100

    def _record(self, step: int, plan: StepPlan | None) -> Json:
        core = self._core
        updates = plan.updates if plan is not None else ()
        work = plan.work if plan is not None else ()
        opened = {u.seq.request_id: u for u in updates if isinstance(u, Open)}
        extended = {u.seq.request_id: u for u in updates if isinstance(u, Extend)}
        new: Json = {}
        cached: Json = {}
        for item in work:
            name = item.seq.request_id
            if name not in opened:
                blocks = list(extended[name].block_ids) if name in extended else []
                cached[name] = {"computed": item.start, "new_blocks": blocks}
            elif item.seq.attempt == 1:
                table = opened[name]
                new[name] = {"cached": table.num_computed, "blocks": list(table.block_ids)}
            else:
                table = opened[name]
                cached[name] = {"computed": item.start, "new_blocks": list(table.block_ids)}
        preempted = [
            u.seq.request_id
            for u in updates
            if isinstance(u, Close) and u.reason is CloseReason.PREEMPTED
        ]
        return {
            "step": step,
            "scheduled": {item.seq.request_id: item.num_tokens for item in work},
            "preempted": sorted(preempted),
            "new": new,
            "running": [r.request_id for r in core.group.running],
            "waiting": [r.request_id for r in core.waiting],
            "free": core.group.pool.num_free,
            "cached": cached,
        }

    def _totals(self) -> Json:
        accounting = self._core.accounting
        causes = accounting.by_cause.values()
        return {
            "preemptions": sum(totals.preemptions for totals in causes),
            "prefix_queries": accounting.queries_tokens,
            "prefix_hits": accounting.hits_tokens,
            "preempted_queries": sum(totals.resume_queries_tokens for totals in causes),
            "preempted_hits": sum(totals.resume_hits_tokens for totals in causes),
            "scheduled_tokens": accounting.scheduled_tokens.total,
        }


def _core_for(workload: _Workload) -> SchedulerCore:
    config = Config(
        scheduler=SchedulerConfig(
            policy=workload.policy,
            max_num_seqs=workload.max_num_seqs,
            max_num_batched_tokens=workload.max_num_batched_tokens,
            steps_in_flight=1,
            enable_chunked_prefill=workload.chunked_prefill,
            long_prefill_token_threshold=workload.long_prefill_token_threshold,
            # Where we go beyond the recorded scheduler, we must not when compared with it.
            resume_first=False,
            slot_preemption=False,
        ),
        cache=CacheConfig(block_size=workload.block_size, enable_prefix_caching=workload.caching),
    )
    resolved = resolve(config, "cpu", model_context_tokens=workload.max_model_len)
    return SchedulerCore(
        scheduler=resolved.scheduler,
        cache=resolved.cache,
        num_blocks=workload.num_blocks,
        max_model_len=workload.max_model_len,
    )
