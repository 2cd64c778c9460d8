"""A core and the little world it needs: a clock, workers whose model is a formula, and clients.

For tests that tell a story: submit, plan, answer, look. The workers are obedient and keep no
KV; what they sample depends on (seed, position) alone, as with a real model run greedily. The
invariants are checked after every event.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

from configs import ResolvedCacheConfig, ResolvedSchedulerConfig
from scheduler import invariants
from scheduler.core import SchedulerCore
from scheduler.messages import (
    Accepted,
    Admission,
    Close,
    EndReason,
    EndRequest,
    Extend,
    FinishReason,
    InterruptionCause,
    Open,
    PromptLogprobs,
    SamplingParams,
    SeqOutput,
    SeqRef,
    SeqWork,
    StepPlan,
    StepResult,
    SubmitRequest,
    TokenDelta,
    TokenLogprobs,
    Usage,
    pack_token_ids,
)
from scheduler.request import Request

_MAX_STEPS = 10_000
_WORDS_PER_LETTER = 10_000
_FIRST_SAMPLED_ID = 2_000_000


def text(letter: str, count: int, start: int = 0) -> list[int]:
    """Token ids that no other letter has: the words [start, start + count) of that letter."""
    first = ord(letter) * _WORDS_PER_LETTER + start
    return list(range(first, first + count))


def sampled(seed: int, position: int) -> int:
    """The token that the model gives at `position`, whatever stands before it."""
    return _FIRST_SAMPLED_ID + seed * _WORDS_PER_LETTER + position


def token_row(position: int, token_id: int) -> TokenLogprobs:
    """The log probability that the model gives to `token_id` at `position`."""
    return TokenLogprobs(logprob=-position / 8, rank=token_id % 7 + 1)


def request_of(
    name: str,
    prompt: Sequence[int],
    sampling: SamplingParams,
    *,
    client: str = "client",
    priority: int = 0,
    salt: str = "",
    arrival: float = 0.0,
    output: Sequence[int] = (),
    usage_so_far: Usage | None = None,
) -> SubmitRequest:
    return SubmitRequest(
        request_id=name,
        client_id=client,
        prompt_token_ids=pack_token_ids(prompt),
        sampling=sampling,
        arrival_seconds=arrival,
        priority=priority,
        cache_salt=salt,
        output_token_ids=pack_token_ids(output),
        usage_so_far=usage_so_far,
    )


class Driver:
    """One core and its world. `now` is the time in seconds; tests move it."""

    def __init__(
        self,
        num_blocks: int,
        *,
        block_size: int = 16,
        max_model_len: int = 1024,
        pipeline_stages: int = 1,
        caching: bool = True,
        record_cache_events: bool = False,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 1024,
        steps_in_flight: int = 1,
        **scheduler: object,
    ) -> None:
        """`num_blocks` counts the null block; `scheduler` are further settings of that section."""
        self.core = SchedulerCore(
            scheduler=ResolvedSchedulerConfig.model_validate(
                {
                    "max_num_seqs": max_num_seqs,
                    "max_num_batched_tokens": max_num_batched_tokens,
                    "steps_in_flight": steps_in_flight,
                    **scheduler,
                }
            ),
            cache=ResolvedCacheConfig(
                block_size=block_size, enable_prefix_caching=caching, hash="xxh3_128"
            ),
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            pipeline_stages=pipeline_stages,
            record_cache_events=record_cache_events,
        )
        self.now = 0.0
        self.script: dict[str, Sequence[int]] = {}
        """What the model says instead of its formula, by request: the output tokens."""
        self.deltas: defaultdict[str, list[TokenDelta]] = defaultdict(list)
        self.plans: list[StepPlan] = []
        """All that were made."""
        self.in_flight: deque[StepPlan] = deque()
        self._opened: dict[SeqRef, Open] = {}
        self._messages: dict[str, SubmitRequest] = {}

    # -- clients ------------------------------------------------------------------------

    def submit(
        self,
        name: str,
        prompt: Sequence[int],
        max_tokens: int = 1,
        *,
        seed: int | None = None,
        priority: int = 0,
        salt: str = "",
        arrival: float | None = None,
        **sampling: object,
    ) -> None:
        """Submit one request, which must be accepted. Each gets a seed of its own if not given."""
        count = len(self._messages)
        parameters = {"max_tokens": max_tokens, "seed": count if seed is None else seed}
        message = request_of(
            name,
            prompt,
            SamplingParams(**{**parameters, **sampling}),  # type: ignore[arg-type]
            priority=priority,
            salt=salt,
            arrival=float(count) if arrival is None else arrival,
        )
        answer = self.offer(message)
        assert answer == Accepted(), answer

    def offer(self, *messages: SubmitRequest) -> Admission:
        """Submit several in one call, and see what the scheduler says."""
        answer = self.core.submit(messages, self.now)
        if isinstance(answer, Accepted):
            for message in messages:
                self._messages.setdefault(message.request_id, message)
        self._listen()
        return answer

    def end(
        self,
        name: str,
        reason: EndReason = EndReason.ABORT,
        num_output_tokens: int | None = None,
    ) -> None:
        self.core.end(EndRequest(name, reason, num_output_tokens), self.now)
        self._listen()

    # -- workers ------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """Let the core plan a step, which is then in flight."""
        plan = self.core.plan(self.now)
        invariants.check(self.core, plan)
        if plan is not None:
            self._opened.update({u.seq: u for u in plan.updates if isinstance(u, Open)})
            self.plans.append(plan)
            self.in_flight.append(plan)
        return plan

    def answer(self) -> None:
        """Let the workers answer the oldest plan in flight."""
        self.deliver(self.result_of(self.in_flight.popleft()))

    def deliver(self, result: StepResult) -> None:
        self.core.apply(result, self.now)
        self._listen()

    def result_of(self, plan: StepPlan) -> StepResult:
        """What obedient workers would say to `plan`."""
        outputs = [output for work in plan.work if (output := self._output(work)) is not None]
        return StepResult(plan.epoch, plan.step_id, tuple(outputs))

    def step(self) -> StepPlan | None:
        """Fill the window and answer its oldest plan. Returns the first plan made."""
        self.now += 1.0
        first = plan = self.plan()
        while plan is not None:
            plan = self.plan()
        if self.in_flight:
            self.answer()
        return first

    def steps(self, count: int) -> list[StepPlan | None]:
        return [self.step() for _ in range(count)]

    def run(self) -> int:
        """Step until all is over; returns the number of steps."""
        for count in range(_MAX_STEPS):
            if self.core.is_idle and not self.in_flight:
                return count
            self.step()
        raise AssertionError(f"{list(self.core.requests)} do not come to an end")

    def lose_group(
        self,
        *,
        num_blocks: int | None = None,
        cause: InterruptionCause = InterruptionCause.WORKER_LOST,
    ) -> list[StepPlan]:
        """A new epoch begins, with a pool of `num_blocks` if that changes.

        Returns the plans that were in flight.
        """
        core = self.core
        core.lose_group(self.now, cause)
        if num_blocks is not None:
            core.begin_epoch(core.group.epoch + 1, num_blocks)
            core.fit(self.now)
        lost = list(self.in_flight)
        self.in_flight.clear()
        self._listen()
        return lost

    def _output(self, work: SeqWork) -> SeqOutput | None:
        opened = self._opened[work.seq]
        end = work.start + work.num_tokens
        rows = self._prompt_rows(opened, work.start, end)
        if not work.sample:
            return None if rows is None else SeqOutput(work.seq, (), prompt_logprobs=rows)
        token_id = self._next_token(opened, end)
        logprobs: tuple[TokenLogprobs, ...] = ()
        if opened.sampling.logprobs is not None:
            logprobs = (token_row(end, token_id),)
        return SeqOutput(work.seq, (token_id,), logprobs, rows)

    def _next_token(self, opened: Open, position: int) -> int:
        script = self.script.get(opened.seq.request_id)
        if script is not None:
            return script[position - opened.num_prompt_tokens]
        return sampled(opened.sampling.seed, position)

    @staticmethod
    def _prompt_rows(opened: Open, start: int, end: int) -> PromptLogprobs | None:
        if opened.sampling.prompt_logprobs is None:
            return None
        known = memoryview(opened.token_ids).cast("i")
        positions = range(start + 1, min(end + 1, opened.num_prompt_tokens))
        rows = tuple(token_row(position, known[position]) for position in positions)
        return PromptLogprobs(start + 1, rows) if rows else None

    def _listen(self) -> None:
        invariants.check(self.core)
        for batch in self.core.take_batches().values():
            for delta in batch.deltas:
                self.deltas[delta.request_id].append(delta)

    # -- to look at ---------------------------------------------------------------------

    def request(self, name: str) -> Request:
        return self.core.requests[name]

    def blocks(self, name: str) -> list[int]:
        return self.core.requests[name].block_ids

    @property
    def running(self) -> list[str]:
        return [request.request_id for request in self.core.group.running]

    @property
    def waiting(self) -> list[str]:
        return [request.request_id for request in self.core.waiting]

    @property
    def free_queue(self) -> list[int]:
        return list(self.core.group.pool.free_queue())

    def output(self, name: str) -> list[int]:
        """All tokens that the client got."""
        return [token_id for delta in self.deltas[name] for token_id in delta.token_ids]

    def solo(self, name: str) -> list[int]:
        """The tokens that it gets alone on a large pool, if nothing stops it early."""
        message = self._messages[name]
        start = len(message.prompt_token_ids) // 4
        sampling = message.sampling
        return [sampled(sampling.seed, start + i) for i in range(sampling.max_tokens)]

    def finish(self, name: str) -> FinishReason | None:
        """How it ended; None if it did not. Fails if it was told to end twice."""
        terminal = [d.finish for d in self.deltas[name] if d.finish is not None]
        assert len(terminal) <= 1, f"{name} ended {len(terminal)} times"
        return terminal[0] if terminal else None

    def usage(self, name: str) -> Usage:
        """The last one that the client was told."""
        return [d.usage for d in self.deltas[name] if d.usage is not None][-1]


def scheduled(plan: StepPlan | None) -> dict[str, int]:
    """How many tokens of which request a plan computes."""
    return {} if plan is None else {work.seq.request_id: work.num_tokens for work in plan.work}


def opened(plan: StepPlan | None) -> dict[str, Open]:
    return {u.seq.request_id: u for u in _updates(plan) if isinstance(u, Open)}


def extended(plan: StepPlan | None) -> dict[str, Extend]:
    return {u.seq.request_id: u for u in _updates(plan) if isinstance(u, Extend)}


def closed(plan: StepPlan | None) -> dict[str, Close]:
    return {u.seq.request_id: u for u in _updates(plan) if isinstance(u, Close)}


def _updates(plan: StepPlan | None) -> Iterable[Open | Extend | Close]:
    return () if plan is None else plan.updates
