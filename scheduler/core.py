"""The scheduler: events in, plans and token batches out. Pure: no I/O, no clock, no threads.

Whoever hosts it (the actor, the simulator, a test) brings time and delivers messages:

    submit, end ──► SchedulerCore ──► plan ──► workers ──► apply ──► take_batches ──► ingress
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial

from configs import ResolvedCacheConfig, ResolvedSchedulerConfig
from scheduler.accounting import Accounting
from scheduler.admission import NAMES_OF_REFUSALS, AdmissionRules
from scheduler.block_pool import AllBlocksCleared, CacheEvent
from scheduler.errors import CacheInUseError, ProtocolError
from scheduler.group import Pipeline, WorkerGroup
from scheduler.messages import (
    Accepted,
    Admission,
    CloseReason,
    EndReason,
    EndRequest,
    FinishReason,
    InterruptionCause,
    SeqOutput,
    StepPlan,
    StepResult,
    SubmitRequest,
    TokenBatch,
    TokenDelta,
    TokenLogprobs,
)
from scheduler.planner import StepPlanner
from scheduler.prefix_cache import BlockHasher
from scheduler.quarantine import VERDICT, Quarantine
from scheduler.request import Move, Request, Status
from scheduler.tombstones import Tombstones

_FINISH_OF_END = {
    EndReason.STOP: FinishReason.STOP,
    EndReason.ABORT: FinishReason.ABORT,
    EndReason.SLOW_CLIENT: FinishReason.ABORT,
}


class SchedulerCore:
    """One model's scheduler. Every accepted request ends in exactly one terminal delta.

    `now` is in seconds, from any clock that does not go back.
    """

    def __init__(
        self,
        *,
        scheduler: ResolvedSchedulerConfig,
        cache: ResolvedCacheConfig,
        num_blocks: int,
        max_model_len: int,
        pipeline_stages: int = 1,
        epoch: int = 0,
        record_cache_events: bool = False,
    ) -> None:
        """`scheduler` must be resolved (`configs.resolve`); `num_blocks` counts the null block.

        Who sets `record_cache_events`, to mirror the prefix map, empties `take_cache_events`.
        """
        self._admission = AdmissionRules(scheduler, max_model_len)
        self.max_num_batched_tokens = scheduler.max_num_batched_tokens
        self._cache_events: list[CacheEvent] | None = [] if record_cache_events else None
        self._submissions = 0
        self._tombstones = Tombstones()
        self._deltas: defaultdict[str, list[TokenDelta]] = defaultdict(list)
        self.requests: dict[str, Request] = {}
        """All that have not ended."""
        self.accounting = Accounting()
        self._quarantine = Quarantine()
        self._new_group = partial(
            WorkerGroup,
            pipeline=Pipeline(pipeline_stages, scheduler.steps_in_flight),
            hasher=BlockHasher(cache.block_size, cache.hash, cache.hash_seed or 0),
            block_size=cache.block_size,
            enable_prefix_caching=cache.enable_prefix_caching,
            evictions=self.accounting.evictions,
            cache_events=self._cache_events,
        )
        self.group = self._new_group(epoch=epoch, num_blocks=num_blocks)
        self._planner = StepPlanner(
            scheduler,
            group=self.group,
            accounting=self.accounting,
            quarantine=self._quarantine,
        )
        self.waiting = self._planner.waiting

    @property
    def is_idle(self) -> bool:
        """No request is alive and the workers have been told of every end."""
        return not self.requests and not self.group.closed

    # -- ingress ------------------------------------------------------------------------

    def submit(self, messages: Sequence[SubmitRequest], now: float) -> Admission:
        """Queue all of `messages`, or none. Ids that are known already change nothing.

        Continuations are never turned away for the length of the queue.
        """
        self._tombstones.expire(now)
        fresh: dict[str, SubmitRequest] = {}
        for message in messages:
            if not self._is_known(message.request_id):
                fresh.setdefault(message.request_id, message)
        refusal = self._admission.refusal(
            fresh.values(), self.waiting, capacity_tokens=self.group.capacity_tokens
        )
        if refusal is not None:
            self.accounting.rejected[NAMES_OF_REFUSALS[type(refusal)]] += 1
            return refusal
        requests = [Request.of(m, self._submissions + i) for i, m in enumerate(fresh.values())]
        self._submissions += len(requests)
        for request in requests:
            self._enter(request, now)
        return Accepted()

    def end(self, message: EndRequest, now: float) -> None:
        """End a request from outside, in whatever state it is; late results are ignored.

        An end that overtook its submission is remembered, and the submission ends at once.
        """
        self._tombstones.expire(now)
        request = self.requests.get(message.request_id)
        if request is not None:
            self._end(request, message, now)
        elif message.request_id not in self._tombstones:
            self._tombstones.remember_early(message, now)

    def abandon(self, client_id: str, now: float) -> None:
        """End, without a word, what belongs to a client that is gone; it may still come back, with
        all whose last delta it has not had."""
        for request in [r for r in self.requests.values() if r.client_id == client_id]:
            self._end(request, EndRequest(request.request_id, EndReason.ABORT), now)
            self.accounting.orphaned_requests += 1
        self._tombstones.forget_client(client_id)
        self._deltas.pop(client_id, None)

    @property
    def has_news(self) -> bool:
        """There are deltas that nobody has taken."""
        return bool(self._deltas)

    def take_batches(self) -> dict[str, TokenBatch]:
        """The deltas since the last call, one batch per client; each delta is given once."""
        taken, self._deltas = self._deltas, defaultdict(list)
        step_id = self.group.window.next_result_id - 1
        return {client: TokenBatch(step_id, tuple(deltas)) for client, deltas in taken.items()}

    def take_cache_events(self) -> list[CacheEvent]:
        """What the prefix map lost since the last call, in order."""
        taken: list[CacheEvent] = []
        if self._cache_events:
            taken, self._cache_events[:] = self._cache_events.copy(), []
        return taken

    # -- workers ------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan | None:
        """The next step; None if there is nothing to say or the window is full.

        A plan once made must be published: its decisions are in force.
        """
        return self._planner.plan(now)

    def apply(self, result: StepResult, now: float) -> None:
        """Take the workers' answer to a step. Results of an earlier epoch are ignored.

        Raises ProtocolError for a result out of order or of an epoch that has not begun.
        """
        group = self.group
        if result.epoch < group.epoch:
            return
        if result.epoch > group.epoch:
            raise ProtocolError(f"result of epoch {result.epoch} in epoch {group.epoch}")
        group.window.answer(result.step_id)
        somebody_ended = False
        for output in result.outputs:
            request = self.requests.get(output.seq.request_id)
            if request is not None and request.ref.attempt == output.seq.attempt:
                somebody_ended |= self._apply_output(request, output, now)
        if somebody_ended:
            group.running = [r for r in group.running if r.status is Status.RUNNING]

    def lose_group(
        self, now: float, cause: InterruptionCause = InterruptionCause.WORKER_LOST
    ) -> bool:
        """Begin a new epoch with an empty pool.

        All that ran goes to the front of the queue in its running order. A request that is proved
        to kill the workers ends here; whether there was one.
        """
        old = self.group
        culprit = None
        if cause is InterruptionCause.WORKER_LOST:
            culprit = self._quarantine.died(r for r in old.running if old.is_in_flight(r))
        for request in reversed(old.running):
            self._planner.interrupt(request, cause, now)
        for request in self.requests.values():  # step ids begin again
            request.last_planned_step = -1
            for bill in request.stalled_by:
                bill.since_step -= old.window.next_step_id
        if self._cache_events is not None:
            self._cache_events.append(AllBlocksCleared())
        self.begin_epoch(old.epoch + 1, old.pool.num_blocks)
        if culprit is not None and culprit.status is Status.WAITING:
            self._finish(culprit, FinishReason.ERROR, now, error=VERDICT)
        return culprit is not None

    def begin_epoch(self, epoch: int, num_blocks: int, pipeline: Pipeline | None = None) -> None:
        """Go on under `epoch`, which need not be the next one, with an empty pool of `num_blocks`.

        `pipeline`: None for that of the epoch before. Before the first plan comes `fit`.
        """
        assert epoch >= self.group.epoch, "epochs only rise"
        assert not self.group.window.next_step_id or epoch > self.group.epoch, "it has run"
        pipeline = pipeline or self.group.pipeline
        group = self._new_group(epoch=epoch, num_blocks=num_blocks, pipeline=pipeline)
        self.group = self._planner.group = group

    def fit(self, now: float) -> None:
        """The workers of the epoch are there: what can no longer fit into their pool ends."""
        for request in list(self.requests.values()):
            self._fit(request, now)

    def end_all(self, error: str, now: float) -> int:
        """End every request with `error`; how many that were."""
        self.group.running = []
        for request in (requests := list(self.requests.values())):
            self._finish(request, FinishReason.ERROR, now, error=error)
        return len(requests)

    def reset_prefix_cache(self) -> None:
        """Forget all cached content. Raises CacheInUseError while blocks are held."""
        pool = self.group.pool
        if pool.num_held:
            raise CacheInUseError(f"{pool.num_held} blocks are held by running requests")
        pool.forget_all()

    # -- life of a request --------------------------------------------------------------

    def _enter(self, request: Request, now: float) -> None:
        self.requests[request.request_id] = request
        request.submitted_seconds = now
        if request.is_continuation:
            held_tokens = request.num_tokens - 1 if request.num_output_tokens else 0
            step_id = self.group.window.next_step_id
            self.accounting.interrupted(
                request, InterruptionCause.SCHEDULER_LOST, held_tokens, now, step_id
            )
        self.waiting.push(request)
        early_end = self._tombstones.early_end(request.request_id)
        if early_end is not None:
            self._end(request, early_end, now)
        else:
            self._fit(request, now)

    def _fit(self, request: Request, now: float) -> None:
        """Cut a waiting request to the pool, and end it if nothing of it is left to do."""
        capacity_tokens = self.group.capacity_tokens
        request.max_total_tokens = self._admission.max_total_tokens(request, capacity_tokens)
        too_large = self._admission.never_fits(
            request.num_prompt_tokens, request.sampling, capacity_tokens
        )
        if too_large is not None and not request.num_output_tokens:
            self._finish(request, FinishReason.ERROR, now, error=too_large.message)
            return
        finish = request.finish_reason() or (FinishReason.LENGTH if too_large else None)
        if finish is not None:
            self._finish(request, finish, now)

    def _apply_output(self, request: Request, output: SeqOutput, now: float) -> bool:
        """Take what the workers say of one request; True if that ended it.

        A table closed since then makes no difference: the token still counts, but the request
        holds no block that could get a hash.
        """
        if output.error is not None:
            self._finish(request, FinishReason.ERROR, now, error=output.error)
            return True
        if output.prompt_logprobs is not None:
            request.keep_prompt_logprobs(output.prompt_logprobs)
        token_ids = output.token_ids
        finish = None
        for count, token_id in enumerate(token_ids, 1):
            finish = request.append(token_id)
            if finish is not None:
                token_ids = token_ids[:count]
                break
        if request.status is Status.WAITING:
            self.waiting.num_tokens += len(token_ids)
        if self._quarantine and token_ids:
            self._quarantine.clear(request)
        logprobs = output.logprobs[: len(token_ids)]
        if finish is not None:
            self._finish(request, finish, now, token_ids=token_ids, logprobs=logprobs)
            return True
        if request.num_tokens >= request.next_hash_at:
            self.group.kv.register(request)
        if request.usage_due and token_ids:
            self._report(request, now, token_ids=token_ids, logprobs=logprobs)
        elif token_ids:
            self._deltas[request.client_id].append(
                TokenDelta(request.request_id, token_ids, logprobs)
            )
        return False

    def _report(
        self,
        request: Request,
        now: float,
        *,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] = (),
        finish: FinishReason | None = None,
        num_output_tokens: int | None = None,
        error: str | None = None,
    ) -> None:
        """Send a delta with usage: the first one, the first after an interruption, the last."""
        if token_ids and request.status is not Status.WAITING:
            # A token that was under way when the table was closed does not end the pause.
            request.usage_due = False
            if request.stalled_by:
                step_id = self.group.window.next_result_id - 1
                self.accounting.stall_ended(request, now, step_id)
        prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        if token_ids:
            prompt_logprobs = tuple(request.prompt_logprobs)
            request.prompt_logprobs.clear()
        self._deltas[request.client_id].append(
            TokenDelta(
                request_id=request.request_id,
                token_ids=token_ids,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                finish=finish,
                usage=request.usage(num_output_tokens),
                error=error,
            )
        )

    def _end(self, request: Request, message: EndRequest, now: float) -> None:
        if request.status is Status.RUNNING:
            self.group.running.remove(request)
        num_output_tokens = message.num_output_tokens
        if num_output_tokens is not None:
            num_output_tokens = min(num_output_tokens, request.num_output_tokens)
        self._finish(
            request, _FINISH_OF_END[message.reason], now, num_output_tokens=num_output_tokens
        )

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        now: float,
        *,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] = (),
        num_output_tokens: int | None = None,
        error: str | None = None,
    ) -> None:
        """The one way to end. A running request is taken off the running list by the caller,
        which may have several."""
        self._report(
            request,
            now,
            token_ids=token_ids,
            logprobs=logprobs,
            finish=reason,
            num_output_tokens=num_output_tokens,
            error=error,
        )
        if request.status is Status.RUNNING:
            gone = reason in (FinishReason.ABORT, FinishReason.ERROR)
            self.group.close_table(request, CloseReason.ABORTED if gone else CloseReason.FINISHED)
        else:
            self.waiting.remove(request)
        request.move(Move.FINISH, self.group.window.next_step_id)
        self.accounting.ended(request, reason)
        self._quarantine.clear(request)
        del self.requests[request.request_id]
        self._tombstones.remember(request.request_id, now, request.client_id)

    def _is_known(self, request_id: str) -> bool:
        """It is alive, or it ended a short while ago. An end that came first does not count."""
        has_ended = request_id in self._tombstones and not self._tombstones.early_end(request_id)
        return has_ended or request_id in self.requests
