"""What interruptions cost: a bill per preemption, summed by cause, and the work done twice.

For every cause, at any time:

    held = recovered + recomputed + dropped + held by those still waiting to resume

A bill is opened when a request loses its blocks. It is booked when the request is admitted
again (recovered: what the lookup found, at most what was held; recomputed: the rest), or
dropped when the request ends before that.
"""

from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field

from scheduler.block_pool import Evictions
from scheduler.histogram import Histogram
from scheduler.messages import FinishReason, InterruptionCause
from scheduler.request import Bill, Request

_DEMAND_WINDOW_SECONDS = 300.0
_NUM_BILLS = 1024


@dataclass(slots=True)
class CauseTotals:
    """Sums over all interruptions of one cause; tokens but for `preemptions` and stalls."""

    preemptions: int = 0
    held_tokens: int = 0
    recovered_tokens: int = 0
    recomputed_tokens: int = 0
    dropped_tokens: int = 0
    resume_queries_tokens: int = 0
    resume_hits_tokens: int = 0
    resumed_requests: int = 0
    stalled_steps: int = 0
    stall_seconds: Histogram = field(default_factory=Histogram.of_seconds)
    """From the interruption to the next token; one that strikes during a stall extends it."""


@dataclass(slots=True)
class ScheduledTokens:
    """Planned tokens by kind. The recompute tax is `recompute / total`."""

    prompt: int = 0
    output: int = 0
    recompute: int = 0

    @property
    def total(self) -> int:
        return self.prompt + self.output + self.recompute

    def add(self, request: Request, start: int, end: int, sign: int = 1) -> None:
        """Book positions [start, end) of `request`, or take them back with `sign` -1."""
        fresh = min(max(start, request.high_water), end)
        output = min(max(fresh, request.num_prompt_tokens), end)
        self.recompute += sign * (fresh - start)
        self.prompt += sign * (output - fresh)
        self.output += sign * (end - output)


class DemandWindow:
    """The highest demand for blocks at any preemption of the last five minutes.

    Constant time, and no work while nothing is preempted: a falling sequence of candidates.
    """

    def __init__(self) -> None:
        self._peaks: deque[tuple[float, int]] = deque()

    def note(self, num_blocks: int, now: float) -> None:
        peaks = self._peaks
        while peaks and peaks[-1][1] <= num_blocks:
            peaks.pop()
        peaks.append((now, num_blocks))
        self._expire(now)

    def num_blocks(self, now: float) -> int:
        """How many blocks would have avoided the preemptions of the window; 0: there were none.

        An estimate from the lengths at the time: requests grow on, so it can be too low, and
        waiting prompts are counted in full, so it can be too high where they share a prefix.
        """
        self._expire(now)
        return self._peaks[0][1] if self._peaks else 0

    def _expire(self, now: float) -> None:
        while self._peaks and self._peaks[0][0] < now - _DEMAND_WINDOW_SECONDS:
            self._peaks.popleft()


class Accounting:
    def __init__(self) -> None:
        self.queries_tokens = 0
        self.hits_tokens = 0
        """Prefix lookups of first admissions; those of resumes are in `by_cause`."""
        self.by_cause: defaultdict[InterruptionCause, CauseTotals] = defaultdict(CauseTotals)
        self.bills: deque[Bill] = deque(maxlen=_NUM_BILLS)
        """The last preemptions one by one, the open ones among them."""
        self.scheduled_tokens = ScheduledTokens()
        self.finished: Counter[FinishReason] = Counter()
        self.rejected: Counter[str] = Counter()
        self.orphaned_requests = 0
        """Ended because the ingress replica that had submitted them is gone."""
        self.request_preemptions = Histogram.of_counts()
        self.queue_seconds = Histogram.of_seconds()
        """Of each request from its submission to its first admission."""
        self.demand = DemandWindow()
        self.evictions = Evictions()

    def interrupted(
        self, request: Request, cause: InterruptionCause, held_tokens: int, now: float, step: int
    ) -> None:
        """`request` loses its blocks, in which `held_tokens` tokens were computed."""
        totals = self.by_cause[cause]
        totals.preemptions += 1
        totals.held_tokens += held_tokens
        request.causes[cause] = request.causes.get(cause, 0) + 1
        request.bill = Bill(request.request_id, cause, held_tokens, now, step)
        request.stalled_by.append(request.bill)
        self.bills.append(request.bill)
        request.high_water = max(request.high_water, held_tokens)
        request.settled = max(request.settled, request.high_water)

    def admitted(self, request: Request, num_hit: int, *, counts_lookup: bool) -> None:
        """`request` is admitted with `num_hit` tokens found in the cache."""
        queries_tokens = request.num_tokens if counts_lookup else 0
        hits_tokens = num_hit if counts_lookup else 0
        bill = request.bill
        if bill is None:
            request.cached_tokens = num_hit
            self.queries_tokens += queries_tokens
            self.hits_tokens += hits_tokens
            return
        request.bill = None
        bill.recovered_tokens = min(num_hit, bill.held_tokens)
        bill.recomputed_tokens = bill.held_tokens - bill.recovered_tokens
        request.recovered_tokens += bill.recovered_tokens
        request.recomputed_tokens += bill.recomputed_tokens
        totals = self.by_cause[bill.cause]
        totals.recovered_tokens += bill.recovered_tokens
        totals.recomputed_tokens += bill.recomputed_tokens
        totals.resume_queries_tokens += queries_tokens
        totals.resume_hits_tokens += hits_tokens
        totals.resumed_requests += 1

    def stall_ended(self, request: Request, now: float, step: int) -> None:
        """A token of `request` arrived after an interruption, or after several."""
        for bill in request.stalled_by:
            bill.stalled_seconds = now - bill.since_seconds
            bill.stalled_steps = step - bill.since_step
        first = request.stalled_by[0]
        assert first.stalled_seconds is not None
        assert first.stalled_steps is not None
        request.stalled_by.clear()
        request.stalled_seconds += first.stalled_seconds
        totals = self.by_cause[first.cause]
        totals.stall_seconds.observe(first.stalled_seconds)
        totals.stalled_steps += first.stalled_steps

    def ended(self, request: Request, reason: FinishReason) -> None:
        bill = request.bill
        if bill is not None:
            bill.dropped_tokens = bill.held_tokens
            self.by_cause[bill.cause].dropped_tokens += bill.held_tokens
            request.bill = None
        request.stalled_by.clear()
        self.finished[reason] += 1
        self.request_preemptions.observe(request.num_preemptions)
