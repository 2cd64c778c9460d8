"""Scheduler to ingress: new tokens, and how the engine is."""

from enum import StrEnum

import msgspec

from scheduler.messages.base import Message
from scheduler.messages.tokens import TokenLogprobs
from scheduler.messages.usage import Usage


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class TokenDelta(Message, frozen=True):
    """News of one request. Exactly one delta of a request is terminal: it has `finish` set.

    `usage` is given on the first token, on the first token after an interruption, and at the
    end, so that an ingress always knows what a continuation must carry.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """All rows, positions 1 to the last of the prompt, with the first token."""
    finish: FinishReason | None = None
    usage: Usage | None = None
    error: str | None = None


class TokenBatch(Message, frozen=True):
    """All deltas of one step for one ingress replica."""

    step_id: int
    deltas: tuple[TokenDelta, ...]


class EngineState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    RECOVERING = "recovering"
    """A part of it died and is being replaced. Requests wait meanwhile."""
    DRAINING = "draining"
    """What was accepted goes on, nothing new is taken."""
    FAILED = "failed"
    """For good; only a new engine helps."""


class EngineInfo(Message, frozen=True):
    """The engine as an ingress replica needs to know it. Sizes are 0 until workers reported."""

    state: EngineState
    reason: str = ""
    """Why no token can be made now, as one sentence; empty when `state` is READY."""
    epoch: int = 0
    max_model_len: int = 0
    vocab_size: int = 0
    block_size: int = 0
    num_blocks: int = 0
    """With the null block."""
    running_requests: int = 0
    waiting_requests: int = 0
    waiting_tokens: int = 0
    tokens_per_second: float = 0.0
    """Tokens that recent steps computed, prompt and output; 0.0 while that is not known."""

    @property
    def capacity_tokens(self) -> int:
        """What all requests together can hold."""
        return max(0, self.num_blocks - 1) * self.block_size

    @property
    def is_ready(self) -> bool:
        return self.state is EngineState.READY

    @property
    def takes_requests(self) -> bool:
        return self.state in (EngineState.READY, EngineState.RECOVERING)

    def while_draining(self, reason: str) -> "EngineInfo":
        """The same for an engine that takes nothing new because of `reason`; empty: it does."""
        if not reason or not self.takes_requests:
            return self
        return msgspec.structs.replace(self, state=EngineState.DRAINING, reason=reason)


class PollAnswer(Message, frozen=True):
    """Answer to a poll of one ingress replica.

    Batches are numbered per replica from 1 on. A poll says which one arrived last, and until
    then the same one is given again. Without news `batches` is empty and `number` is the one
    that the poll named.
    """

    number: int
    batches: tuple[TokenBatch, ...]
    info: EngineInfo
    is_new: bool = False
    """This scheduler does not know the replica: it is to `resume` what it has, and to poll from
    batch 0 then."""
