"""What the world knows of every request by watching: plans that go out, deltas that come back.

It keeps its own books (hits, what a preemption held, recovered and recomputed, tokens planned)
from the messages alone, so that they can be compared with those of the core.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from msgspec import structs

from scheduler.accounting import Accounting
from scheduler.messages import (
    Close,
    CloseReason,
    EndReason,
    Extend,
    FinishReason,
    InterruptionCause,
    Open,
    StepPlan,
    TokenDelta,
    Usage,
    pack_token_ids,
    unpack_token_ids,
)
from tests.support.episode_config import EpisodeConfig
from tests.support.workload import Job


def _as_seen(cause: InterruptionCause) -> InterruptionCause:
    """A plan does not tell blocks from slots: both are a closed table, and count as blocks here."""
    return InterruptionCause.BLOCKS if cause is InterruptionCause.SLOTS else cause


# Two among others, and two alone.
_LOSSES_OF_A_CULPRIT = 4


class MismatchError(AssertionError):
    """The core did something that no rule allows."""


@dataclass(slots=True)
class Costs:
    """Tokens, summed over the interruptions of one cause."""

    held: int = 0
    recovered: int = 0
    recomputed: int = 0
    dropped: int = 0


@dataclass(slots=True, eq=False)
class Tracked:
    """One accepted request."""

    job: Job
    capacity_tokens: int
    """What the pool holds: a request that would grow beyond is cut."""
    received: list[int] = field(default_factory=list)
    """Output tokens that the client has, with those that a continuation brought along."""
    finish: FinishReason | None = None
    end_reason: EndReason | None = None
    end_tokens: int | None = None
    """What we ended it with."""
    poisoned: bool = False
    cut_off: bool = False
    """A smaller pool made it end."""
    losses_in_a_row: int = 0
    """Workers that died while it ran, since its last token."""
    attempt: int = 0
    is_open: bool = False
    num_computed: int = 0
    """By the plans that went out."""
    cached_tokens: int | None = None
    """Unknown until the first admission."""
    causes: Counter[InterruptionCause] = field(default_factory=Counter)
    bill: tuple[InterruptionCause, int] | None = None
    """The open one: why it was interrupted, and how many tokens it held."""
    recovered: int = 0
    recomputed: int = 0
    stalled_since: float | None = None
    stalled_seconds: float = 0.0
    usage_due: bool = True
    usage: Usage | None = None
    """The last one the client was told."""

    def restore(self, usage: Usage) -> None:
        """Take over the history that a continuation brings along."""
        self.cached_tokens = usage.cached_tokens
        if usage.interruptions is not None:
            for cause, count in usage.interruptions.causes.items():
                self.causes[_as_seen(cause)] += count
            self.recovered = usage.interruptions.recovered_tokens
            self.recomputed = usage.interruptions.recomputed_tokens
            self.stalled_seconds = usage.interruptions.stalled_seconds

    def continuation(self) -> Job:
        """What the client submits to a new scheduler: all that it has."""
        message = structs.replace(
            self.job.message,
            output_token_ids=pack_token_ids(self.received),
            usage_so_far=self.usage,
        )
        return Job(message, self.job.prompt, self.job.solo)

    @property
    def request_id(self) -> str:
        return self.job.message.request_id

    @property
    def num_tokens(self) -> int:
        return len(self.job.prompt) + len(self.received)


class Ledger:
    def __init__(self, config: EpisodeConfig) -> None:
        self._config = config
        self.seen: Counter[str] = Counter()
        """How often the interesting things happened."""
        self.start_books()

    def start_books(self) -> None:
        """Nothing lives and nothing is booked: a new core begins."""
        self.live: dict[str, Tracked] = {}
        self.by_cause: defaultdict[InterruptionCause, Costs] = defaultdict(Costs)
        self.queries_tokens = 0
        self.hits_tokens = 0
        self.scheduled_tokens = 0
        self.finished: Counter[FinishReason] = Counter()

    # Requests

    def accept(self, job: Job, now: float, capacity_tokens: int) -> Tracked:
        tracked = Tracked(job, capacity_tokens)
        tracked.received.extend(unpack_token_ids(job.message.output_token_ids))
        usage = tracked.usage = job.message.usage_so_far
        if usage is not None:
            tracked.restore(usage)
            # What the dead scheduler held: all but the token that was sampled last.
            tracked.num_computed = tracked.num_tokens - 1 if tracked.received else 0
            self.interrupt(tracked, InterruptionCause.SCHEDULER_LOST, now)
            tracked.num_computed = 0
            self.seen["continuations"] += 1
        self.live[tracked.request_id] = tracked
        return tracked

    def interrupt(self, tracked: Tracked, cause: InterruptionCause, now: float) -> None:
        """Its table is gone, and it waits again."""
        tracked.is_open = False
        tracked.bill = (cause, tracked.num_computed)
        tracked.causes[cause] += 1
        tracked.losses_in_a_row += cause is InterruptionCause.WORKER_LOST
        tracked.usage_due = True
        if tracked.stalled_since is None:
            tracked.stalled_since = now
        self.by_cause[cause].held += tracked.num_computed

    # Plans

    def on_plan(self, plan: StepPlan, now: float) -> None:
        for update in plan.updates:
            tracked = self.live.get(update.seq.request_id)
            match update:
                case Open():
                    if tracked is None:
                        raise MismatchError(f"{update.seq} is opened, but no such request lives")
                    self._on_open(tracked, update)
                case Close():
                    self._on_close(tracked, update, now)
                case Extend():
                    pass
        for work in plan.work:
            self.scheduled_tokens += work.num_tokens
            tracked = self.live.get(work.seq.request_id)
            if tracked is None or not tracked.is_open or tracked.attempt != work.seq.attempt:
                raise MismatchError(f"{work} for a request that does not run")
            tracked.num_computed = work.start + work.num_tokens

    def _on_open(self, tracked: Tracked, opened: Open) -> None:
        if tracked.is_open or opened.seq.attempt != tracked.attempt + 1:
            raise MismatchError(f"{opened.seq} is opened after attempt {tracked.attempt}")
        tracked.attempt += 1
        tracked.is_open = True
        hit = tracked.num_computed = opened.num_computed
        known = (*tracked.job.prompt, *tracked.received)
        token_ids = tuple(unpack_token_ids(opened.token_ids))
        if token_ids != known and self._config.takes_at_once:
            raise MismatchError(f"{opened.seq} is opened with {token_ids}, the client has {known}")
        if opened.num_prompt_tokens != len(tracked.job.prompt):
            raise MismatchError(f"{opened.seq}: {opened.num_prompt_tokens} prompt tokens are wrong")
        if hit >= len(token_ids):
            raise MismatchError(f"{opened.seq}: a hit of {hit} leaves nothing to compute")
        counts = self._config.cache.enable_prefix_caching
        if tracked.bill is None:
            if tracked.cached_tokens is None:
                tracked.cached_tokens = hit
            if tracked.job.message.sampling.prompt_logprobs is not None:
                counts = False
            self.queries_tokens += len(token_ids) * counts
            self.hits_tokens += hit * counts
            return
        cause, held = tracked.bill
        tracked.bill = None
        recovered = min(hit, held)
        costs = self.by_cause[cause]
        costs.recovered += recovered
        costs.recomputed += held - recovered
        tracked.recovered += recovered
        tracked.recomputed += held - recovered
        self.seen["resumes"] += 1
        self.seen["resumes that found something"] += hit > 0

    def _on_close(self, tracked: Tracked | None, closed: Close, now: float) -> None:
        if closed.reason is CloseReason.PREEMPTED:
            if tracked is None or not tracked.is_open or tracked.attempt != closed.seq.attempt:
                raise MismatchError(f"{closed} of a request that does not run")
            self.interrupt(tracked, InterruptionCause.BLOCKS, now)
            self.seen["preemptions"] += 1
        elif tracked is not None and tracked.attempt == closed.seq.attempt:
            if self._config.takes_at_once:
                raise MismatchError(f"{closed}, but the client has not been told of an end")
            tracked.is_open = False

    # Deltas

    def on_delta(self, client_id: str, delta: TokenDelta, now: float) -> Tracked:
        tracked = self.live.get(delta.request_id)
        if tracked is None:
            raise MismatchError(f"news of a request that has ended or never was: {delta}")
        job = tracked.job
        if client_id != job.message.client_id:
            raise MismatchError(f"{client_id} got news of {job.message.client_id}'s {delta}")
        if delta.token_ids:
            self._on_tokens(tracked, delta, now)
        elif delta.logprobs or delta.prompt_logprobs or delta.finish is None:
            raise MismatchError(f"a delta without tokens: {delta}")
        if delta.usage is not None:
            tracked.usage = delta.usage
        if delta.finish is not None:
            del self.live[tracked.request_id]
            self._on_finish(tracked, delta)
        return tracked

    def _on_tokens(self, tracked: Tracked, delta: TokenDelta, now: float) -> None:
        solo = tracked.job.solo
        tracked.losses_in_a_row = 0
        first = len(tracked.received)
        tracked.received.extend(delta.token_ids)
        expected = solo.token_ids[first : first + len(delta.token_ids)]
        if delta.token_ids != expected:
            raise MismatchError(
                f"wrong text: output {first} of {tracked.request_id} should go on with "
                f"{expected}, got {delta.token_ids}"
            )
        if delta.logprobs != solo.logprobs[first : first + len(delta.token_ids)]:
            raise MismatchError(f"wrong logprobs: {delta}")
        rows = solo.prompt_logprobs if first == 0 else ()
        if delta.prompt_logprobs != rows:
            raise MismatchError(
                f"{len(delta.prompt_logprobs)} prompt logprobs of {tracked.request_id} at output "
                f"{first}, {len(rows)} were due or some differ"
            )
        self.seen["prompt logprob rows"] += len(rows)
        if self._config.takes_at_once:
            self.seen["tokens of a closed table"] += tracked.bill is not None
        if tracked.is_open and tracked.stalled_since is not None:
            # A token that was under way when the table was closed does not end the pause.
            tracked.stalled_seconds += now - tracked.stalled_since
            tracked.stalled_since = None
        if self._config.takes_at_once and delta.finish is None:
            if tracked.usage_due != (delta.usage is not None):
                raise MismatchError(f"usage is {'' if tracked.usage_due else 'not '}due in {delta}")
            if delta.usage is not None:
                self._check_usage(tracked, delta.usage, len(tracked.received))
        if tracked.is_open:
            tracked.usage_due = False

    def _on_finish(self, tracked: Tracked, delta: TokenDelta) -> None:
        finish = delta.finish
        assert finish is not None
        tracked.finish = finish
        self.finished[finish] += 1
        if tracked.bill is not None:
            cause, held = tracked.bill
            self.by_cause[cause].dropped += held
        if delta.usage is None:
            raise MismatchError(f"the last delta of {tracked.request_id} has no usage")
        num_charged = len(tracked.received)
        if tracked.end_reason is EndReason.STOP and tracked.end_tokens is not None:
            num_charged = tracked.end_tokens
        self._check_usage(tracked, delta.usage, num_charged)
        if (finish is FinishReason.ERROR) != (delta.error is not None):
            raise MismatchError(f"finish and error disagree: {delta}")
        if not self._may_finish(tracked, finish):
            raise MismatchError(
                f"{tracked.request_id} ended with {finish} after {len(tracked.received)} of "
                f"{len(tracked.job.solo.token_ids)} tokens; solo it ends with "
                f"{tracked.job.solo.finish}"
            )

    def _may_finish(self, tracked: Tracked, finish: FinishReason) -> bool:
        if tracked.end_reason is not None:
            self.seen[f"ended by {tracked.end_reason}"] += 1
            expected = FinishReason.STOP if tracked.end_reason is EndReason.STOP else None
            return finish is (expected or FinishReason.ABORT)
        if tracked.cut_off:
            self.seen["cut off by a smaller pool"] += 1
            return finish is (FinishReason.LENGTH if tracked.received else FinishReason.ERROR)
        solo = tracked.job.solo
        if len(tracked.received) == len(solo.token_ids):
            return finish is solo.finish
        if finish is FinishReason.LENGTH:
            self.seen["clamped by the pool"] += 1
            # The last token needs no slot.
            return tracked.num_tokens == tracked.capacity_tokens + 1
        if tracked.losses_in_a_row >= _LOSSES_OF_A_CULPRIT:
            self.seen["taken for what kills the workers"] += 1
            return finish is FinishReason.ERROR
        return finish is FinishReason.ERROR and tracked.poisoned

    def _check_usage(self, tracked: Tracked, usage: Usage, num_output_tokens: int) -> None:
        causes: Counter[InterruptionCause] = Counter()
        recovered = recomputed = 0
        stalled_seconds = 0.0
        interruptions = usage.interruptions
        if interruptions is not None:
            for cause, count in interruptions.causes.items():
                causes[_as_seen(cause)] += count
            recovered = interruptions.recovered_tokens
            recomputed = interruptions.recomputed_tokens
            stalled_seconds = interruptions.stalled_seconds
        prompt_tokens = len(tracked.job.prompt)
        cached_tokens = tracked.cached_tokens or 0
        got = (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
        expected = (prompt_tokens, num_output_tokens, cached_tokens)
        if got != expected:
            raise MismatchError(f"usage of {tracked.request_id}: {usage}, expected {expected}")
        if (causes, recovered, recomputed) != (
            tracked.causes,
            tracked.recovered,
            tracked.recomputed,
        ):
            raise MismatchError(
                f"{tracked.request_id}: {usage.interruptions}, seen: {dict(tracked.causes)} with "
                f"{tracked.recovered} tokens recovered and {tracked.recomputed} recomputed"
            )
        if self._config.takes_at_once and abs(stalled_seconds - tracked.stalled_seconds) > 1e-6:
            raise MismatchError(
                f"{tracked.request_id} stalled for {tracked.stalled_seconds} s, usage says "
                f"{stalled_seconds}"
            )

    # The end

    def compare(self, accounting: Accounting) -> None:
        """Raises MismatchError where the books of the core differ from these."""
        by_cause: defaultdict[InterruptionCause, Costs] = defaultdict(Costs)
        for cause, totals in accounting.by_cause.items():
            costs = by_cause[_as_seen(cause)]
            costs.held += totals.held_tokens
            costs.recovered += totals.recovered_tokens
            costs.recomputed += totals.recomputed_tokens
            costs.dropped += totals.dropped_tokens
        for cause, costs in by_cause.items():
            if costs.held != costs.recovered + costs.recomputed + costs.dropped:
                raise MismatchError(f"the bill of {cause} does not add up: {costs}")
            if costs != self.by_cause[cause]:
                raise MismatchError(
                    f"the bill of {cause} is {costs}, seen was {self.by_cause[cause]}"
                )
        for what, booked, seen in (
            ("tokens looked up", accounting.queries_tokens, self.queries_tokens),
            ("tokens hit", accounting.hits_tokens, self.hits_tokens),
            ("tokens planned", accounting.scheduled_tokens.total, self.scheduled_tokens),
            ("finished requests", accounting.finished, self.finished),
        ):
            if booked != seen:
                raise MismatchError(f"{what}: {booked} booked, {seen} seen")
