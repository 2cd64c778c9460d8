"""Ingress to scheduler: a request, its end from outside, and the answer to a submission."""

from enum import StrEnum
from typing import TypeAlias

from scheduler.messages.base import Message
from scheduler.messages.tokens import PackedTokenIds
from scheduler.messages.usage import Usage


class EndReason(StrEnum):
    """Why somebody outside the scheduler ends a request."""

    STOP = "stop"
    """A stop text was completed; the ingress alone knows text."""
    ABORT = "abort"
    SLOW_CLIENT = "slow_client"


class SamplingParams(Message, frozen=True):
    """How the next token is chosen, and when to stop.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 are off. Token sequences in `bad_words`
    are never completed. The random number of a token depends on (`seed`, position) alone.
    """

    max_tokens: int
    seed: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """How many alternatives to report beside each sampled token; None: no logprobs."""
    prompt_logprobs: int | None = None


class SubmitRequest(Message, frozen=True):
    """One sequence to generate. Submitting the same id again changes nothing.

    A *continuation* takes up a request that lost its scheduler: `output_token_ids` are the
    tokens the client already has, `usage_so_far` is the usage the ingress was last told of.
    """

    request_id: str
    client_id: str
    prompt_token_ids: PackedTokenIds
    sampling: SamplingParams
    arrival_seconds: float
    priority: int = 0
    """Smaller is more urgent; used under the priority policy only."""
    cache_salt: str = ""
    output_token_ids: PackedTokenIds = b""
    usage_so_far: Usage | None = None
    """None: a new request, not a continuation."""
    client_request_id: str = ""
    """Under which whoever runs the server may abort it, beside the id of its answer."""


class SubmitRequests(Message, frozen=True):
    """To be accepted all together, or not at all."""

    requests: tuple[SubmitRequest, ...]


class EndRequest(Message, frozen=True):
    """End a request from outside, whatever it is doing.

    `num_output_tokens` is what the client is charged for: up to and with the token that
    completed a stop text. None: everything sent so far.
    """

    request_id: str
    reason: EndReason
    num_output_tokens: int | None = None


class AbortRequests(Message, frozen=True):
    """End all requests whose answer or whose client's own id is among `ids`."""

    ids: tuple[str, ...]


class Accepted(Message, frozen=True, tag=True):
    pass


class QueueFull(Message, frozen=True, tag=True):
    """Too many requests, or too many tokens, are waiting. Try again later."""

    message: str


class NeverFits(Message, frozen=True, tag=True):
    """The request is larger than the whole block pool, which holds `capacity_tokens`."""

    message: str
    capacity_tokens: int


class BadRequest(Message, frozen=True, tag=True):
    message: str
    param: str


Admission: TypeAlias = Accepted | QueueFull | NeverFits | BadRequest


class Unavailable(Message, frozen=True, tag=True):
    """The engine takes no requests in this state; nothing was looked at."""

    message: str


SubmitAnswer: TypeAlias = Admission | Unavailable
