"""One step: who computes how many tokens, and who must give up blocks or a slot for it.

Running requests first, in the order of admission; then, if nobody lost blocks in this step,
waiting ones. `num_computed` advances when the plan is made, so that the next step can be
planned before results are back.
"""

from dataclasses import dataclass, field

from configs import ResolvedSchedulerConfig
from scheduler.accounting import Accounting
from scheduler.group import WorkerGroup
from scheduler.messages import (
    CloseReason,
    Extend,
    InterruptionCause,
    Open,
    SeqRef,
    SeqWork,
    StepPlan,
    Update,
)
from scheduler.policy import Fcfs, Policy, Priority, WaitingQueue
from scheduler.quarantine import Quarantine
from scheduler.request import NEVER, Move, Request, Status
from scheduler.slots import choose_slot_victims


@dataclass(slots=True)
class _Draft:
    """A plan in the making. `work[i]` is the work of `planned[i]`."""

    step_id: int
    budget: int
    """Tokens that may still be planned."""
    planned: list[Request] = field(default_factory=list)
    work: list[SeqWork] = field(default_factory=list)
    grown: list[Request] = field(default_factory=list)
    """Running requests that got blocks."""
    opened: list[tuple[Request, int]] = field(default_factory=list)
    """Admitted requests, with the tokens found in the cache."""
    ran_dry: bool = False
    """Somebody was preempted for blocks."""


class StepPlanner:
    """Plans steps for `group`, which its owner replaces when the epoch changes."""

    def __init__(
        self,
        config: ResolvedSchedulerConfig,
        *,
        group: WorkerGroup,
        accounting: Accounting,
        quarantine: Quarantine,
    ) -> None:
        self._max_num_seqs = config.max_num_seqs
        self._max_num_batched_tokens = config.max_num_batched_tokens
        self._chunked = config.enable_chunked_prefill
        self._threshold = config.long_prefill_token_threshold or NEVER
        self._policy: Policy = (
            Priority(resume_first=config.resume_first) if config.policy == "priority" else Fcfs()
        )
        self._slot_preemption = config.policy == "priority" and config.slot_preemption
        self._accounting = accounting
        self._quarantine = quarantine
        self._requeues = 0
        self._admissions = 0
        self.group = group
        self.waiting = WaitingQueue(self._policy)

    def plan(self, now: float) -> StepPlan | None:
        """The next step; None if there is nothing to say or the window is full.

        What is returned must reach the workers: the decisions are already made.
        """
        group = self.group
        if group.window.is_full:
            return None
        group.pool.now_seconds = now
        draft = _Draft(group.window.next_step_id, self._max_num_batched_tokens)
        if self._quarantine.suspect is not None:
            if group.window.num_in_flight:
                return None  # whose work it is that kills shall be beyond doubt
            self._plan_alone(draft, self._quarantine.suspect, now)
        else:
            if self._slot_preemption:
                self._preempt_for_slots(now)
            self._plan_running(draft, now)
            if not draft.ran_dry:
                self._plan_waiting(draft)
        updates = self._updates(draft)
        if not updates and not draft.work:
            return None
        group.window.publish()
        return StepPlan(group.epoch, draft.step_id, updates, tuple(draft.work))

    def interrupt(self, request: Request, cause: InterruptionCause, now: float) -> None:
        """Send a request, already off the running list, back to the queue.

        Its blocks are freed and its tokens kept. Setting `num_computed` to 0 is what forces a
        new lookup at resume, and the lookup is what hands the context back.
        """
        step_id = self.group.window.next_step_id
        self._accounting.interrupted(request, cause, request.num_computed, now, step_id)
        request.move(Move.PREEMPT, step_id)
        self.group.close_table(request, CloseReason.PREEMPTED)
        request.num_computed = 0
        request.usage_due = True
        self._requeues -= 1
        request.requeue_index = self._requeues
        self.waiting.push(request)

    # -- running requests ---------------------------------------------------------------

    def _plan_running(self, draft: _Draft, now: float, only: Request | None = None) -> None:
        """The hot loop: in steady decode all of its cost is per running request."""
        group = self.group
        running, block_size, window = group.running, group.kv.block_size, group.window
        planned, work, step_id = draft.planned, draft.work, draft.step_id
        # With pipeline stages every stage shall have a batch of its own to work on.
        num_stages = group.pipeline.num_stages
        pipelined = num_stages > 1
        decodes_left = -(-len(running) // num_stages) if pipelined else NEVER
        num_output_tokens = 0
        index = 0
        while index < len(running) and draft.budget:
            request = running[index]
            index += 1
            start = request.num_computed
            num_tokens = request.num_lacking
            if not num_tokens or (only is not None and request is not only):
                continue
            if pipelined:
                if window.is_in_flight(request.last_planned_step):
                    continue
                if num_tokens == 1:
                    if not decodes_left:
                        continue
                    decodes_left -= 1
            if num_tokens > 1:
                num_tokens = min(num_tokens, draft.budget, self._chunk_limit())
            end = start + num_tokens
            if end > len(request.block_ids) * block_size:
                index = self._make_room(draft, request, end, index, now)
                if request.status is not Status.RUNNING:
                    continue
                draft.grown.append(request)
            sample = end == request.num_expected
            if sample:
                request.num_expected = end + 1
            request.num_computed = end
            request.last_planned_step = step_id
            if end >= request.next_hash_at:
                group.kv.register(request)
            planned.append(request)
            work.append(SeqWork(request.ref, start, num_tokens, sample))
            draft.budget -= num_tokens
            if start >= request.settled:
                num_output_tokens += num_tokens
            else:
                self._accounting.scheduled_tokens.add(request, start, end)
        self._accounting.scheduled_tokens.output += num_output_tokens

    def _chunk_limit(self) -> int:
        """The most tokens of one request in this step, if others are there too."""
        alone = len(self.group.running) + len(self.waiting) <= 1
        return NEVER if alone else self._threshold

    def _make_room(
        self, draft: _Draft, request: Request, num_slots: int, index: int, now: float
    ) -> int:
        """Give `request` a table of `num_slots` slots, preempting until the blocks are there,
        in the worst case the request itself. Returns `index` into the running list, moved
        along with what was removed before it."""
        group = self.group
        running = group.running
        while not group.kv.grow(request, num_slots):
            if not draft.ran_dry:
                self._note_demand(running[index - 1 :], now)
            draft.ran_dry = True
            victim = max(running, key=self._policy.victim_key)
            position = running.index(victim)
            del running[position]
            if position < index:
                index -= 1
            if victim.last_planned_step == draft.step_id:
                self._take_back(draft, victim)
            self.interrupt(victim, InterruptionCause.BLOCKS, now)
            if victim is request:
                break
        return index

    def _take_back(self, draft: _Draft, victim: Request) -> None:
        """Strike the work of `victim` from the draft, as if it had never been planned."""
        i = draft.planned.index(victim)
        del draft.planned[i]
        work = draft.work.pop(i)
        end = victim.num_computed
        if work.sample:
            victim.num_expected -= 1
        victim.num_computed = work.start
        victim.last_planned_step = draft.step_id - 1  # where the work before this one may be
        if victim in draft.grown:
            draft.grown.remove(victim)
        self.group.kv.take_back(victim, work.start)
        draft.budget += work.num_tokens
        self._accounting.scheduled_tokens.add(victim, work.start, end, sign=-1)

    def _note_demand(self, unplanned: list[Request], now: float) -> None:
        """Blocks that would be held now had nobody been preempted, everybody who is yet
        `unplanned` in this step been served, and every slot been filled from the queue: what
        the load wanted, at its current lengths."""
        group, waiting = self.group, self.waiting
        shortage = 0
        for request in unplanned:
            num_needed = group.kv.blocks_for(request.num_computed + request.num_lacking)
            shortage += max(0, num_needed - len(request.block_ids))
        num_places = self._max_num_seqs - len(group.running)
        share = min(1.0, num_places / len(waiting)) if waiting else 0.0
        wanted = group.kv.blocks_for(int(waiting.num_tokens * share))
        demand = group.pool.num_held + shortage + wanted
        self._accounting.demand.note(demand + 1, now)  # and the null block

    # -- waiting requests ---------------------------------------------------------------

    def _plan_waiting(self, draft: _Draft) -> None:
        group, waiting = self.group, self.waiting
        while draft.budget and waiting and len(group.running) < self._max_num_seqs:
            if not self._try_to_admit(draft, waiting.peek()):
                break

    def _try_to_admit(self, draft: _Draft, request: Request) -> bool:
        """Whether `request` got in; nothing is changed if it did not."""
        group = self.group
        if group.is_in_flight(request):
            # Opened again before its last token is back, that token would be dropped and
            # computed anew, and the request may be preempted for the same lack of room.
            return False
        if group.kv.is_still_refused(request):
            return False
        hit = group.kv.find_hit(request)
        num_hit = len(hit) * group.kv.block_size
        num_tokens = min(request.num_tokens - num_hit, self._chunk_limit())
        if num_tokens > draft.budget:
            if not self._chunked:
                return False
            num_tokens = draft.budget
        if not group.kv.admit(request, hit, num_hit + num_tokens):
            return False
        self.waiting.remove(request)
        self._admit(draft, request, num_hit, num_hit + num_tokens)
        return True

    def _plan_alone(self, draft: _Draft, suspect: Request, now: float) -> None:
        """A step of nobody else, at the expense of those that were found innocent before."""
        running = self.group.running
        if suspect.status is Status.RUNNING:
            self._plan_running(draft, now, only=suspect)
            return
        while len(running) >= self._max_num_seqs or not self._try_to_admit(draft, suspect):
            if not running:
                break
            self.interrupt(running.pop(), InterruptionCause.BLOCKS, now)

    def _admit(self, draft: _Draft, request: Request, num_hit: int, end: int) -> None:
        group, accounting = self.group, self._accounting
        counts_lookup = group.kv.enable_prefix_caching and (
            request.sampling.prompt_logprobs is None or request.bill is not None
        )
        if request.bill is None:
            waited_seconds = group.pool.now_seconds - request.submitted_seconds
            accounting.queue_seconds.observe(waited_seconds)
        accounting.admitted(request, num_hit, counts_lookup=counts_lookup)
        accounting.scheduled_tokens.add(request, num_hit, end)
        request.move(Move.ADMIT, draft.step_id)
        request.ref = SeqRef(request.request_id, request.attempt + 1)
        self._admissions += 1
        request.admission_index = self._admissions
        request.num_computed = end
        request.num_expected = request.num_tokens
        sample = end == request.num_expected
        if sample:
            request.num_expected += 1
        request.last_planned_step = draft.step_id
        if end >= request.next_hash_at:
            group.kv.register(request)
        group.running.append(request)
        draft.opened.append((request, num_hit))
        draft.planned.append(request)
        draft.work.append(SeqWork(request.ref, num_hit, end - num_hit, sample))
        draft.budget -= end - num_hit

    # -- slots --------------------------------------------------------------------------

    def _preempt_for_slots(self, now: float) -> None:
        """Strictly more urgent requests take the slots of the least urgent running ones: one
        victim each, and only if the urgent request will then be admitted in this step."""
        group = self.group
        if not self.waiting or len(group.running) < self._max_num_seqs:
            return
        for victim in choose_slot_victims(
            group,
            self.waiting,
            self._policy,
            budget=self._max_num_batched_tokens,
            chunk_limit=self._threshold,
            chunked=self._chunked,
            pipelined=group.pipeline.num_stages > 1,
        ):
            group.running.remove(victim)
            self.interrupt(victim, InterruptionCause.SLOTS, now)

    # -- the wire -----------------------------------------------------------------------

    def _updates(self, draft: _Draft) -> tuple[Update, ...]:
        """Closed tables first: their blocks may already be in a table that opens here."""
        group = self.group
        updates: list[Update] = [*group.closed]
        group.closed.clear()
        for request, num_hit in draft.opened:
            updates.append(_open(request, num_hit))
        if group.pipeline.num_stages == 1:
            # Every worker appends what was sampled to its mirror itself; only blocks are news.
            for request in draft.grown:
                updates.append(_extend(request, with_tokens=False))
        else:
            for request in draft.planned:
                if request.num_sent_tokens < request.num_tokens or request.num_sent_blocks < len(
                    request.block_ids
                ):
                    updates.append(_extend(request, with_tokens=True))
        return tuple(updates)


def _open(request: Request, num_hit: int) -> Open:
    request.num_sent_blocks = len(request.block_ids)
    request.num_sent_tokens = request.num_tokens
    return Open(
        seq=request.ref,
        token_ids=request.token_ids.tobytes(),
        num_prompt_tokens=request.num_prompt_tokens,
        block_ids=tuple(request.block_ids),
        num_computed=num_hit,
        sampling=request.sampling,
    )


def _extend(request: Request, *, with_tokens: bool) -> Extend:
    token_ids: tuple[int, ...] = ()
    if with_tokens:
        token_ids = tuple(request.token_ids[request.num_sent_tokens :])
        request.num_sent_tokens = request.num_tokens
    block_ids = tuple(request.block_ids[request.num_sent_blocks :])
    request.num_sent_blocks = len(request.block_ids)
    return Extend(request.ref, token_ids, block_ids)
