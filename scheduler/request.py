"""One request: what is known of it, what is computed of it, and the moves it may make.

    0          num_prompt_tokens                 num_tokens    num_expected     max_total_tokens
    |── prompt ──────|── output, known ──────────────|── in flight ──|── not yet ───────|
    |── computed or planned ──────────────|── lacking ───────────────|
    0                               num_computed

`num_expected` differs from `num_tokens` while sampled tokens are still on their way back from
the workers (look-ahead). There is no prefill state and no decode state: a request lacks
`num_expected - num_computed` tokens, and that is all a step needs to know.
"""

import sys
from array import array
from collections import deque
from collections.abc import Container
from dataclasses import dataclass, field
from enum import Enum

from scheduler.errors import IllegalMoveError, ProtocolError
from scheduler.messages import (
    FinishReason,
    InterruptionCause,
    Interruptions,
    PromptLogprobs,
    SamplingParams,
    SeqRef,
    SubmitRequest,
    TokenLogprobs,
    Usage,
    unpack_token_ids,
)
from scheduler.prefix_cache import BlockHash

NEVER = sys.maxsize
_STORY_LENGTH = 32


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Move(Enum):
    ADMIT = "admit"
    PREEMPT = "preempt"
    FINISH = "finish"


_MOVES = {
    (Status.WAITING, Move.ADMIT): Status.RUNNING,
    (Status.RUNNING, Move.PREEMPT): Status.WAITING,
    (Status.RUNNING, Move.FINISH): Status.FINISHED,
    # Aborted, refused, or its last token arrived after a preemption.
    (Status.WAITING, Move.FINISH): Status.FINISHED,
}


@dataclass(slots=True)
class Bill:
    """What one preemption cost, filled in as it becomes known.

    held = recovered + recomputed + dropped, as soon as the request is admitted again or ends.
    """

    request_id: str
    cause: InterruptionCause
    held_tokens: int
    since_seconds: float
    since_step: int
    recovered_tokens: int = 0
    recomputed_tokens: int = 0
    dropped_tokens: int = 0
    stalled_seconds: float | None = None
    """Until the next token; None: there was none yet, or ever."""
    stalled_steps: int | None = None


@dataclass(slots=True, eq=False)
class Request:
    """Owned by the scheduler core; nothing else changes it."""

    request_id: str
    client_id: str
    client_request_id: str
    sampling: SamplingParams
    priority: int
    arrival_seconds: float
    submit_index: int
    cache_salt: str
    is_continuation: bool

    token_ids: "array[int]"
    """Prompt and known output."""
    num_prompt_tokens: int
    max_total_tokens: int
    """The length at which it ends; follows the size of the pool (see `core.fit`)."""
    stop_token_ids: frozenset[int]
    """End-of-sequence ids, unless ignored, and the request's own stop ids."""

    ref: SeqRef
    submitted_seconds: float = 0.0
    """On the clock of the core, unlike `arrival_seconds`."""
    status: Status = Status.WAITING
    requeue_index: int = 0
    """Falls with each return to the queue, so that the last to return is the first to go."""
    admission_index: int = 0
    last_planned_step: int = -1

    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[BlockHash] = field(default_factory=list)
    """Of the leading full blocks of `token_ids`, as far as anyone asked; outlives the table."""
    num_registered: int = 0
    """Leading blocks of the table that carry their hash in the pool."""
    next_hash_at: int = NEVER
    """The token count at which the next block is full; NEVER with caching off."""
    num_computed: int = 0
    num_expected: int = 0
    num_sent_blocks: int = 0
    num_sent_tokens: int = 0
    """How much of the table and of the tokens the workers know."""

    usage_due: bool = True
    """The next delta carries usage: it is the first, or the first after an interruption."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Rows of the positions 1, 2, … of the prompt, kept until the first token."""
    cached_tokens: int = 0

    bill: Bill | None = None
    """Open from a preemption until it is admitted again."""
    stalled_by: list[Bill] = field(default_factory=list)
    """The preemptions since its last token: the pause that its client sees."""
    causes: dict[InterruptionCause, int] = field(default_factory=dict)
    recovered_tokens: int = 0
    recomputed_tokens: int = 0
    stalled_seconds: float = 0.0
    high_water: int = 0
    """The most tokens it ever held at a preemption: computing below it is recomputing."""
    settled: int = 0
    """From here on each computed token is new output: past prompt and high water."""

    story: deque[tuple[int, str]] = field(default_factory=lambda: deque(maxlen=_STORY_LENGTH))
    """The last moves as (step, what): ids and counts only, never content."""

    @classmethod
    def of(cls, message: SubmitRequest, submit_index: int) -> "Request":
        """A waiting request; its `max_total_tokens` is still to be fitted to the pool."""
        token_ids = unpack_token_ids(message.prompt_token_ids)
        num_prompt_tokens = len(token_ids)
        token_ids.frombytes(message.output_token_ids)
        sampling = message.sampling
        eos_token_ids = () if sampling.ignore_eos else sampling.eos_token_ids
        request = cls(
            request_id=message.request_id,
            client_id=message.client_id,
            client_request_id=message.client_request_id,
            sampling=sampling,
            priority=message.priority,
            arrival_seconds=message.arrival_seconds,
            submit_index=submit_index,
            cache_salt=message.cache_salt,
            is_continuation=message.usage_so_far is not None,
            token_ids=token_ids,
            num_prompt_tokens=num_prompt_tokens,
            max_total_tokens=num_prompt_tokens + sampling.max_tokens,
            stop_token_ids=frozenset((*eos_token_ids, *sampling.stop_token_ids)),
            ref=SeqRef(message.request_id, 0),
            settled=num_prompt_tokens,
        )
        if message.usage_so_far is not None:
            request._restore(message.usage_so_far)
        return request

    def _restore(self, usage: Usage) -> None:
        self.cached_tokens = usage.cached_tokens
        if usage.interruptions is not None:
            self.causes = dict(usage.interruptions.causes)
            self.recovered_tokens = usage.interruptions.recovered_tokens
            self.recomputed_tokens = usage.interruptions.recomputed_tokens
            self.stalled_seconds = usage.interruptions.stalled_seconds

    # -- facts --------------------------------------------------------------------------

    @property
    def answer_id(self) -> str:
        """Of the answer that this sequence is a choice of."""
        return self.request_id.rpartition("/")[0]

    def is_called(self, ids: Container[str]) -> bool:
        """Whether its answer's or its client's own id is among them."""
        return self.answer_id in ids or self.client_request_id in ids

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_lacking(self) -> int:
        """Tokens it could compute now. The last token of all needs no slot: nobody reads it."""
        num_needed = self.num_expected
        if num_needed >= self.max_total_tokens:
            num_needed -= 1
        return num_needed - self.num_computed

    @property
    def attempt(self) -> int:
        return self.ref.attempt

    @property
    def num_preemptions(self) -> int:
        return sum(self.causes.values())

    @property
    def was_interrupted(self) -> bool:
        """It has run before, here or under an earlier scheduler."""
        return bool(self.causes)

    @property
    def hit_limit(self) -> int:
        """The most tokens a lookup may take from the cache.

        One short of all, because the last must be computed to get logits; and while prompt
        logprobs are missing, one short of the first missing row, whose logits come from the
        token before it.
        """
        if self.sampling.prompt_logprobs is not None and not self.num_output_tokens:
            return len(self.prompt_logprobs)
        return self.num_tokens - 1

    def usage(self, num_output_tokens: int | None = None) -> Usage:
        interruptions = None
        if self.causes:
            interruptions = Interruptions(
                causes=dict(self.causes),
                recovered_tokens=self.recovered_tokens,
                recomputed_tokens=self.recomputed_tokens,
                stalled_seconds=self.stalled_seconds,
            )
        if num_output_tokens is None:
            num_output_tokens = self.num_output_tokens
        return Usage(self.num_prompt_tokens, num_output_tokens, self.cached_tokens, interruptions)

    # -- changes ------------------------------------------------------------------------

    def append(self, token_id: int) -> FinishReason | None:
        """Add a sampled token and say whether it ends the request, and why."""
        self.token_ids.append(token_id)
        if token_id not in self.stop_token_ids and len(self.token_ids) < self.max_total_tokens:
            return None
        return self.finish_reason()

    def finish_reason(self) -> FinishReason | None:
        """Whether the last known token ends it, and why.

        The sampler masks the stops until there are `min_tokens`; so does this.
        """
        may_stop = self.num_output_tokens > self.sampling.min_tokens
        if may_stop and self.token_ids[-1] in self.stop_token_ids:
            return FinishReason.STOP
        if self.num_tokens >= self.max_total_tokens:
            return FinishReason.LENGTH
        return None

    def keep_prompt_logprobs(self, news: PromptLogprobs) -> None:
        """Add the rows that are still missing; a recomputed prompt brings some again, or all,
        long after they went out with the first token.

        Raises ProtocolError if rows were left out.
        """
        if self.num_output_tokens:
            return
        num_known = len(self.prompt_logprobs)
        num_again = num_known + 1 - news.first_position
        if num_again < 0:
            raise ProtocolError(
                f"request {self.request_id}: prompt logprobs from position"
                f" {news.first_position}, expected {num_known + 1} or less"
            )
        self.prompt_logprobs += news.rows[num_again:]

    def move(self, move: Move, step: int) -> None:
        """Raises IllegalMoveError, with nothing changed, if no rule allows it."""
        status = _MOVES.get((self.status, move))
        if status is None:
            told = "; ".join(f"step {at}: {what}" for at, what in self.story)
            raise IllegalMoveError(
                f"request {self.request_id}: {move.value} is illegal while {self.status.value}"
                f" (story: {told})"
            )
        self.status = status
        self.story.append((step, f"{move.value} with {self.num_computed}/{self.num_tokens} tokens"))
