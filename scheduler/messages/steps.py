"""Scheduler to workers and back: one step of a worker group.

A plan is full once and a difference after: `Open` carries all that a worker needs to know of a
sequence, `Extend` only what is new, `Close` nothing but the reason.
"""

from enum import StrEnum
from typing import TypeAlias

from scheduler.messages.base import Message
from scheduler.messages.requests import SamplingParams
from scheduler.messages.tokens import PackedTokenIds, PromptLogprobs, TokenLogprobs


class SeqRef(Message, frozen=True):
    """One opening of one request's block table. The attempt rises each time it is opened."""

    request_id: str
    attempt: int


class CloseReason(StrEnum):
    FINISHED = "finished"
    PREEMPTED = "preempted"
    ABORTED = "aborted"


class Open(Message, frozen=True, tag=True):
    """Open a block table: all that a worker needs to know of a sequence.

    The KV of `token_ids[:num_computed]` already lies in `block_ids`.
    """

    seq: SeqRef
    token_ids: PackedTokenIds
    """Prompt and generated tokens."""
    num_prompt_tokens: int
    block_ids: tuple[int, ...]
    num_computed: int
    sampling: SamplingParams


class Extend(Message, frozen=True, tag=True):
    """Append to an open table. Ids that the workers sampled under look-ahead are not sent."""

    seq: SeqRef
    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]


class Close(Message, frozen=True, tag=True):
    """Forget the table. Its blocks may belong to another sequence from this plan on."""

    seq: SeqRef
    reason: CloseReason


Update: TypeAlias = Open | Extend | Close


class SeqWork(Message, frozen=True):
    """Compute the KV of positions [start, start + num_tokens); `sample` the token after them.

    `start` is redundant on purpose: the worker checks it against its mirror.
    """

    seq: SeqRef
    start: int
    num_tokens: int
    sample: bool


class StepPlan(Message, frozen=True):
    """One step of one worker group. Updates are applied in order, before any work.

    Step ids start at 0 in every epoch and are consecutive; every plan is answered by one
    `StepResult`, also a plan of updates only.
    """

    epoch: int
    step_id: int
    updates: tuple[Update, ...]
    work: tuple[SeqWork, ...]


class SeqOutput(Message, frozen=True):
    """What one piece of work produced. `error` ends this request and no other."""

    seq: SeqRef
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per token where the request asked for them, else empty."""
    prompt_logprobs: PromptLogprobs | None = None
    error: str | None = None


class StepResult(Message, frozen=True, tag=True):
    epoch: int
    step_id: int
    outputs: tuple[SeqOutput, ...]
    execute_seconds: float = 0.0
    gap_seconds: float = 0.0
    """From the end of the step before to the start of this one, idle or waiting for the plan."""


class WorkerFault(Message, frozen=True, tag=True):
    """A rank cannot go on in this epoch. `kind` is the name of the error, `message` its text."""

    epoch: int
    step_id: int
    rank: int
    kind: str
    message: str


class Heartbeat(Message, frozen=True, tag=True):
    """A rank is there and waits for step `step_id`. The first one says that it has joined."""

    epoch: int
    rank: int
    step_id: int


WorkerMessage: TypeAlias = StepResult | WorkerFault | Heartbeat
