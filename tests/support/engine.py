"""The real scheduler in this process, over a model that repeats its prompt.

EngineClient ──► LocalCalls ──► SchedulerActor ──► step loop ──► ParrotLink
"""

import asyncio
import re
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from cluster.engine_client import EngineClient
from configs import Config, ResolvedConfig, resolve
from scheduler.actor import GroupSize, SchedulerActor
from scheduler.messages import (
    Admission,
    Close,
    EndRequest,
    Extend,
    Heartbeat,
    Open,
    PollAnswer,
    SamplingParams,
    SeqOutput,
    SeqRef,
    StepPlan,
    StepResult,
    SubmitRequest,
    SubmitRequests,
    Tally,
    TallyAnswer,
    Unavailable,
    WorkerMessage,
    decode,
    decode_submit_answer,
    encode,
    unpack_token_ids,
)

_LAST_USER_MESSAGE = re.compile(r".*<\|im_start\|>user\n(.*?)<\|im_end\|>", re.DOTALL)


class Parrot:
    """Says what the prompt says (of a chat: its last user message), then ends.

    With a temperature it begins at a place that the seed decides, so that choices differ. Before
    `min_tokens`, and with `ignore_eos`, it begins again instead of ending.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def lines(self, prompt: Sequence[int]) -> list[int]:
        """What is repeated."""
        message = _LAST_USER_MESSAGE.match(
            self._tokenizer.decode(prompt, skip_special_tokens=False)
        )
        if message is None:
            return list(prompt)
        token_ids: list[int] = self._tokenizer.encode(message[1], add_special_tokens=False).ids
        return token_ids

    def next_token(self, lines: Sequence[int], num_output: int, sampling: SamplingParams) -> int:
        allowed = sampling.allowed_token_ids
        if allowed:
            return allowed[num_output % len(allowed)]
        may_end = num_output >= sampling.min_tokens and not sampling.ignore_eos
        if num_output and num_output % len(lines) == 0 and may_end and sampling.eos_token_ids:
            return sampling.eos_token_ids[0]
        start = sampling.seed % len(lines) if sampling.temperature else 0
        return lines[(start + num_output) % len(lines)]


@dataclass(slots=True)
class _Sequence:
    """The worker's mirror of one open table."""

    opened: Open
    lines: Sequence[int]
    token_ids: list[int]


@dataclass
class ParrotLink:
    """The scheduler's link to a worker that answers each step after `step_seconds`.

    It checks that the scheduler feeds it every token in order.
    """

    parrot: Parrot
    epoch: int = 0
    step_seconds: float = 0.0
    num_steps: int = 0
    fail_with: str | None = None
    """The error of every sequence that is worked on from now on."""
    _answers: deque[tuple[float, WorkerMessage]] = field(default_factory=deque)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _woken: bool = False
    _sequences: dict[SeqRef, _Sequence] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._answers.append((0.0, Heartbeat(self.epoch, 0, 0)))

    @property
    def address(self) -> str:
        return "in this process"

    def open(self) -> "ParrotLink":
        return self

    def publish(self, plan: StepPlan) -> None:
        self.num_steps += 1
        result = self._execute(plan)
        due_seconds = time.monotonic() + self.step_seconds
        with self._changed:
            if self._answers:
                due_seconds = max(due_seconds, self._answers[-1][0] + self.step_seconds)
            self._answers.append((due_seconds, result))
            self._changed.notify()

    def receive(self, timeout_seconds: float) -> list[WorkerMessage]:
        until = time.monotonic() + timeout_seconds
        with self._changed:
            while not self._woken:
                now = time.monotonic()
                due = []
                while self._answers and self._answers[0][0] <= now:
                    due.append(self._answers.popleft()[1])
                if due or now >= until:
                    return due
                next_due = self._answers[0][0] if self._answers else until
                self._changed.wait(min(next_due, until) - now)
            self._woken = False
            return []

    def wake(self) -> None:
        with self._changed:
            self._woken = True
            self._changed.notify()

    def close(self) -> None:
        pass

    def _execute(self, plan: StepPlan) -> StepResult:
        for update in plan.updates:
            match update:
                case Open(seq=seq):
                    token_ids = list(unpack_token_ids(update.token_ids))
                    prompt = token_ids[: update.num_prompt_tokens]
                    self._sequences[seq] = _Sequence(update, self.parrot.lines(prompt), token_ids)
                case Extend(seq=seq):
                    self._sequences[seq].token_ids += update.token_ids
                case Close(seq=seq):
                    del self._sequences[seq]
        outputs = []
        for work in plan.work:
            sequence = self._sequences[work.seq]
            assert work.start + work.num_tokens <= len(sequence.token_ids)
            if work.sample:
                outputs.append(self._sample(work.seq, sequence))
        return StepResult(plan.epoch, plan.step_id, tuple(outputs))

    def _sample(self, seq: SeqRef, sequence: _Sequence) -> SeqOutput:
        num_output = len(sequence.token_ids) - sequence.opened.num_prompt_tokens
        sampling = sequence.opened.sampling
        token_id = self.parrot.next_token(sequence.lines, num_output, sampling)
        sequence.token_ids.append(token_id)
        if self.fail_with is not None:
            return SeqOutput(seq, (), error=self.fail_with)
        return SeqOutput(seq, (token_id,))


class LocalCalls:
    """EngineCalls without a network, but through the wire format."""

    def __init__(self, actor: SchedulerActor) -> None:
        self._actor = actor

    async def submit(self, messages: Sequence[SubmitRequest]) -> Admission | Unavailable:
        return decode_submit_answer(
            await self._actor.submit(encode(SubmitRequests(tuple(messages))))
        )

    async def resume(
        self, client_id: str, messages: Sequence[SubmitRequest]
    ) -> Admission | Unavailable:
        data = encode(SubmitRequests(tuple(messages)))
        return decode_submit_answer(await self._actor.resume(client_id, data))

    async def end(self, message: EndRequest) -> None:
        await self._actor.end(encode(message))

    async def poll(self, client_id: str, last_batch: int) -> PollAnswer:
        return decode(await self._actor.poll(client_id, last_batch), PollAnswer)

    async def exchange_counts(self, report: Tally) -> TallyAnswer:
        return decode(await self._actor.exchange_counts(encode(report)), TallyAnswer)

    async def reset_prefix_cache(self) -> None:
        await self._actor.reset_prefix_cache()


@dataclass(frozen=True, slots=True)
class LocalEngine:
    client: EngineClient
    actor: SchedulerActor
    link: ParrotLink
    config: ResolvedConfig

    async def held_blocks(self) -> int:
        """Blocks of live requests."""
        status = await self.actor.status()
        assert status.counters is not None
        return status.counters.held_blocks


@asynccontextmanager
async def local_engine(
    tokenizer: Tokenizer,
    config: Config | None = None,
    *,
    num_blocks: int = 1025,
    max_model_len: int = 2048,
    step_seconds: float = 0.0,
) -> AsyncIterator[LocalEngine]:
    """A running engine, ready when entered."""
    resolved = resolve(config or Config(), "cpu")
    link = ParrotLink(Parrot(tokenizer), step_seconds=step_seconds)
    actor = SchedulerActor(resolved, on_crash=lambda: None)
    await actor.open_link(link)
    size = GroupSize(
        num_ranks=1,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        vocab_size=tokenizer.get_vocab_size(),
    )
    await actor.begin(0, size)
    client = EngineClient(LocalCalls(actor))
    client.start()
    try:
        await client.wait_ready(timeout_seconds=10)
        yield LocalEngine(client, actor, link, resolved)
    finally:
        await client.close()
        await actor.stop()
        await asyncio.sleep(0)
