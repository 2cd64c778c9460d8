"""The event loop: arrivals and ends of steps, in the order of a virtual clock."""

from array import array
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import inf, nan

from configs import ResolvedCacheConfig, ResolvedSchedulerConfig
from scheduler.core import SchedulerCore
from scheduler.errors import BrokenInvariantError, SchedulerError
from scheduler.messages import (
    Accepted,
    SamplingParams,
    SeqOutput,
    StepPlan,
    StepResult,
    SubmitRequest,
)
from scheduler.simulate.result import Quantiles, SimulationResult, Timeline
from scheduler.simulate.workload import ID_BITS, ID_MASK, TraceRequest, prompt_token_ids

_CLIENT_ID = "simulation"
_SEED_STRIDE = 0x2545F491  # odd: requests start their made-up outputs far from each other


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What a step takes: `decode_step_seconds` for any work, and its prefill tokens on top.

    Every token of a piece of work longer than one token counts as prefill. A decode step costs
    the same for 1 and for 256 requests and for any context: it is bound by reading the weights.
    """

    prefill_tokens_per_second: float
    decode_step_seconds: float

    def seconds(self, prefill_tokens: int) -> float:
        return self.decode_step_seconds + prefill_tokens / self.prefill_tokens_per_second


class AllRefusedError(SchedulerError):
    """Not one request of the workload was accepted."""


@dataclass(slots=True)
class _Sender:
    """Who sent one request, and what has come back."""

    number: int
    arrival_seconds: float
    wanted_tokens: int
    received_tokens: int = 0
    last_token_seconds: float = nan


class _Simulation:
    def __init__(
        self,
        requests: Sequence[TraceRequest],
        core: SchedulerCore,
        costs: StepCosts,
        *,
        pipeline_stages: int,
    ) -> None:
        self._core = core
        self._costs = costs
        self._stages = pipeline_stages
        self._requests = requests
        self._num_arrived = 0
        self._unique_from = 1 << (ID_BITS - 1)  # prefix ids have the lower half to themselves
        self._senders: dict[str, _Sender] = {}
        self._in_flight: deque[tuple[float, StepResult]] = deque()
        self._first_stage_free_seconds = 0.0
        self.timeline = Timeline()
        self.ttft_seconds = array("d")
        self.itl_seconds = array("f")
        self.refused: Counter[str] = Counter()
        self.first_refusal = ""
        self.steps = 0
        self.finished = 0
        self.cut_short = 0
        self.output_tokens = 0
        self.peak_demand_blocks = 0

    def run(self, on_progress: Callable[[int], None]) -> None:
        """Until every request has ended. `on_progress` is told how many have so far."""
        now, ended = 0.0, 0
        while True:
            self._submit_arrived(now)
            while (plan := self._core.plan(now)) is not None:
                self._launch(plan, now)
            self._record(now)
            arrival, end = self._next_arrival_seconds(), self._next_end_seconds()
            now = min(arrival, end)
            if now == inf:
                break
            if end <= arrival:
                self._retire(now)
                if ended != self.finished:
                    ended = self.finished
                    on_progress(ended + self.refused.total())
        lost = len(self._requests) - self.finished - self.refused.total()
        if lost:
            raise BrokenInvariantError(f"nothing is left to do, but {lost} requests have not ended")

    def _next_arrival_seconds(self) -> float:
        if self._num_arrived == len(self._requests):
            return inf
        return self._requests[self._num_arrived].arrival_seconds

    def _next_end_seconds(self) -> float:
        return self._in_flight[0][0] if self._in_flight else inf

    def _submit_arrived(self, now: float) -> None:
        while self._next_arrival_seconds() <= now:
            self._submit(self._num_arrived, self._requests[self._num_arrived])
            self._num_arrived += 1

    def _submit(self, number: int, request: TraceRequest) -> None:
        prompt = prompt_token_ids(request, self._unique_from)
        self._unique_from += request.prompt_tokens
        sampling = SamplingParams(
            max_tokens=request.output_tokens, seed=number, temperature=0.0, ignore_eos=True
        )
        request_id = str(number)
        submitted = SubmitRequest(
            request_id=request_id,
            client_id=_CLIENT_ID,
            prompt_token_ids=prompt,
            sampling=sampling,
            arrival_seconds=request.arrival_seconds,
        )
        answer = self._core.submit([submitted], request.arrival_seconds)
        if isinstance(answer, Accepted):
            self._senders[request_id] = _Sender(
                number, request.arrival_seconds, request.output_tokens
            )
        else:
            self.refused[type(answer).__name__] += 1
            self.first_refusal = self.first_refusal or answer.message

    def _launch(self, plan: StepPlan, now: float) -> None:
        """Decide what the workers will answer to `plan`, and when."""
        senders = self._senders
        prefill_tokens = 0
        outputs = []
        for work in plan.work:
            if work.num_tokens > 1:
                prefill_tokens += work.num_tokens
            if work.sample:
                seed = senders[work.seq.request_id].number
                token_id = (seed * _SEED_STRIDE + work.start + work.num_tokens) & ID_MASK
                outputs.append(SeqOutput(work.seq, (token_id,)))
        seconds = self._costs.seconds(prefill_tokens) if plan.work else 0.0
        # A stage takes its share of the step, and then the next step can enter the pipeline.
        start = max(now, self._first_stage_free_seconds)
        self._first_stage_free_seconds = start + seconds / self._stages
        end = max(start + seconds, self._in_flight[-1][0] if self._in_flight else 0.0)
        result = StepResult(plan.epoch, plan.step_id, tuple(outputs), seconds)
        self._in_flight.append((end, result))

    def _retire(self, now: float) -> None:
        """Give the oldest step in flight its result, and the senders their tokens."""
        core = self._core
        core.apply(self._in_flight.popleft()[1], now)
        self.steps += 1
        for batch in core.take_batches().values():
            for delta in batch.deltas:
                sender = self._senders[delta.request_id]
                if delta.token_ids:
                    if sender.received_tokens:
                        self.itl_seconds.append(now - sender.last_token_seconds)
                    else:
                        self.ttft_seconds.append(now - sender.arrival_seconds)
                    sender.received_tokens += len(delta.token_ids)
                    self.output_tokens += len(delta.token_ids)
                    sender.last_token_seconds = now
                if delta.finish is not None:
                    self.finished += 1
                    self.cut_short += sender.received_tokens < sender.wanted_tokens

    def _record(self, now: float) -> None:
        core = self._core
        pool, accounting = core.group.pool, core.accounting
        bills = accounting.by_cause.values()
        self.timeline.record(
            now,
            pool.num_held,
            pool.num_evictable,
            pool.num_scratch,
            len(core.group.running),
            len(core.waiting),
            core.waiting.num_interrupted,
            sum(bill.preemptions for bill in bills),
            sum(bill.recovered_tokens for bill in bills),
            sum(bill.recomputed_tokens for bill in bills),
            accounting.queries_tokens,
            accounting.hits_tokens,
            sum(bill.resume_queries_tokens for bill in bills),
            sum(bill.resume_hits_tokens for bill in bills),
        )
        demand_blocks = accounting.demand.num_blocks(now)
        self.peak_demand_blocks = max(self.peak_demand_blocks, demand_blocks)

    def result(self) -> SimulationResult:
        if not self.finished:
            raise AllRefusedError(
                f"all {len(self._requests)} requests were refused, the first one because "
                f"{self.first_refusal}"
            )
        core, timeline = self._core, self.timeline
        accounting = core.accounting
        bills = accounting.by_cause.values()
        return SimulationResult(
            num_blocks=core.group.pool.num_blocks,
            block_size=core.group.kv.block_size,
            requests=len(self._requests),
            finished=self.finished,
            cut_short=self.cut_short,
            refused=dict(self.refused),
            steps=self.steps,
            simulated_seconds=timeline.end_seconds,
            output_tokens=self.output_tokens,
            scheduled_tokens=asdict(accounting.scheduled_tokens),
            time_to_first_token=Quantiles.of(self.ttft_seconds),
            inter_token_latency=Quantiles.of(self.itl_seconds),
            queries_tokens=accounting.queries_tokens,
            hits_tokens=accounting.hits_tokens,
            resume_queries_tokens=sum(bill.resume_queries_tokens for bill in bills),
            resume_hits_tokens=sum(bill.resume_hits_tokens for bill in bills),
            preemptions={
                cause.value: bill.preemptions for cause, bill in accounting.by_cause.items()
            },
            held_tokens=sum(bill.held_tokens for bill in bills),
            recovered_tokens=sum(bill.recovered_tokens for bill in bills),
            recomputed_tokens=sum(bill.recomputed_tokens for bill in bills),
            dropped_tokens=sum(bill.dropped_tokens for bill in bills),
            evictions=accounting.evictions.count,
            peak_running=timeline.peak("running"),
            peak_waiting=timeline.peak("waiting"),
            peak_held_blocks=timeline.peak("held_blocks"),
            peak_demand_blocks=self.peak_demand_blocks,
            timeline=timeline,
        )


def simulate(
    requests: Sequence[TraceRequest],
    *,
    scheduler: ResolvedSchedulerConfig,
    cache: ResolvedCacheConfig,
    num_blocks: int,
    max_model_len: int,
    costs: StepCosts,
    pipeline_stages: int = 1,
    on_progress: Callable[[int], None] = lambda ended: None,
) -> SimulationResult:
    """Serve `requests`, in order of arrival, with a pool of `num_blocks`.

    `on_progress` is told the number of requests that have ended whenever some have.
    Raises AllRefusedError, naming the reason of the first refusal, if nothing could be served.
    """
    core = SchedulerCore(
        scheduler=scheduler,
        cache=cache,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        pipeline_stages=pipeline_stages,
    )
    simulation = _Simulation(requests, core, costs, pipeline_stages=pipeline_stages)
    simulation.run(on_progress)
    return simulation.result()
