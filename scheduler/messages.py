"""Every message that crosses a process: frozen, slotted, and a closed set.

A message is full once and a difference after: `Open` carries all that a worker needs to
know of a sequence, `Extend` only what is new, `Close` nothing but the reason.

Token ids have two shapes. A whole prompt travels *packed* (`pack_token_ids`: little-endian
int32, as every machine that Ray runs on stores it), because msgpack needs milliseconds for
128,000 integers and next to nothing for a copy; the few ids of one step travel as a tuple.
"""

from array import array
from collections.abc import Iterable
from enum import StrEnum
from typing import TypeAlias, TypeVar

import msgspec

PackedTokenIds: TypeAlias = bytes
"""Token ids as little-endian int32, 4 bytes each."""

TOKEN_BYTES = 4


def pack_token_ids(token_ids: Iterable[int]) -> PackedTokenIds:
    """The packed form of `token_ids`; raises OverflowError for an id that needs over 31 bits."""
    return array("i", token_ids).tobytes()


def unpack_token_ids(packed: PackedTokenIds) -> "array[int]":
    """A new array of the packed ids; raises ValueError if `packed` is no multiple of 4 bytes."""
    token_ids = array("i")
    token_ids.frombytes(packed)
    return token_ids


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """Base of all messages. They form trees, never cycles, so the collector can skip them.

    Unknown fields are refused, not skipped: nobody shall send what nobody reads, and skipping
    follows the nesting of what a stranger sent as deep as it goes.
    """


# ---------------------------------------------------------------------------------------
# Vocabulary


class InterruptionCause(StrEnum):
    """Why a running request lost its blocks."""

    BLOCKS = "blocks"
    """The pool ran dry."""
    SLOTS = "slots"
    """A strictly more urgent request took its place among `max_num_seqs`."""
    WORKER_LOST = "worker_lost"
    SCHEDULER_LOST = "scheduler_lost"
    RESIZE = "resize"
    DRAIN = "drain"


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class EndReason(StrEnum):
    """Why somebody outside the scheduler ends a request."""

    STOP = "stop"
    """A stop text was completed; the ingress alone knows text."""
    ABORT = "abort"
    SLOW_CLIENT = "slow_client"


class CloseReason(StrEnum):
    FINISHED = "finished"
    PREEMPTED = "preempted"
    ABORTED = "aborted"


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


class SeqRef(Message, frozen=True):
    """One opening of one request's block table. The attempt rises each time it is opened."""

    request_id: str
    attempt: int


class Interruptions(Message, frozen=True):
    """What a request went through so far: its preemptions and what they cost."""

    causes: dict[InterruptionCause, int]
    recovered_tokens: int = 0
    recomputed_tokens: int = 0
    stalled_seconds: float = 0.0

    @property
    def count(self) -> int:
        return sum(self.causes.values())


class Usage(Message, frozen=True):
    """Tokens of one request. `cached_tokens` is the prefix hit of its first admission."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    interruptions: Interruptions | None = None
    """None: never interrupted."""


class TokenLogprobs(Message, frozen=True):
    """The log probability of one token, its rank (1 is the likeliest), and the likeliest ones."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class PromptLogprobs(Message, frozen=True):
    """Rows for the consecutive prompt positions from `first_position` on.

    The row of position p rates the prompt token p given those before it; position 0 has none.
    """

    first_position: int
    rows: tuple[TokenLogprobs, ...]


# ---------------------------------------------------------------------------------------
# Ingress to scheduler, and the answer


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


# ---------------------------------------------------------------------------------------
# Scheduler to workers


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


# ---------------------------------------------------------------------------------------
# Workers to scheduler


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


# ---------------------------------------------------------------------------------------
# Supervisor to workers, and the answer


class JoinGroup(Message, frozen=True):
    """Form a group with the other ranks, for one epoch; the one before is over."""

    epoch: int
    rank: int
    host: str
    """The address of this rank at which the others reach it, and at no other."""
    store_host: str
    store_port: int
    """Where rank 0 listens, so that all can find each other."""
    store_prefix: str
    """Of all keys in that store, so that nothing of another epoch can be found there."""


class WorkerHello(Message, frozen=True):
    """What a rank brings into its group."""

    epoch: int
    rank: int
    num_blocks: int
    """Blocks of KV cache, with the null block: what fits on every rank of the group."""
    block_bytes: int
    """On this rank."""
    model_digest: str
    """The same on all ranks that read the same model."""
    vocab_size: int
    max_model_len: int
    """The context length, in tokens: the configured one, or else the model's own."""


# ---------------------------------------------------------------------------------------
# Scheduler to ingress


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


# ---------------------------------------------------------------------------------------
# What is counted, between ingress and scheduler


class HistogramCounts(Message, frozen=True):
    """Of a histogram with fixed bounds: how many values each bucket has, and their sum."""

    bucket_counts: tuple[int, ...]
    sum: float


class Counts(Message, frozen=True):
    """What one process has counted since it began. No number in it ever falls.

    By metric, and within it by the value of the metric's label, which is "" without one.
    """

    version: int
    """Rises with each copy that the process gives away: of two copies the higher one holds."""
    counters: dict[str, dict[str, int]]
    histograms: dict[str, dict[str, HistogramCounts]]


class Tally(Message, frozen=True):
    """What all processes have counted, kept apart so that nothing is added twice."""

    sources: dict[str, Counts]
    retired: Counts
    """The sum of processes that have long been gone, whose ids are `retired_ids`."""
    retired_ids: tuple[str, ...]


class Gauges(Message, frozen=True):
    """How full things are at this moment."""

    running_requests: int
    waiting_new_requests: int
    waiting_preempted_requests: int
    held_blocks: int
    evictable_blocks: int
    scratch_blocks: int
    wanted_blocks: int
    """The pool, with the null block, that would have avoided the preemptions of the last five
    minutes; 0: there were none."""
    epoch: int


class TallyAnswer(Message, frozen=True):
    tally: Tally
    gauges: Gauges | None
    """None: there are no workers."""


# ---------------------------------------------------------------------------------------
# Wire

M = TypeVar("M", bound=Message)

_encoder = msgspec.msgpack.Encoder()
_decoders: dict[object, msgspec.msgpack.Decoder[object]] = {}
_worker_decoder: msgspec.msgpack.Decoder[WorkerMessage] = msgspec.msgpack.Decoder(WorkerMessage)
_answer_decoder: msgspec.msgpack.Decoder[SubmitAnswer] = msgspec.msgpack.Decoder(SubmitAnswer)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode_worker_message(data: bytes) -> WorkerMessage:
    """What a worker sent; raises msgspec.DecodeError (ValidationError is one) on anything else."""
    return _worker_decoder.decode(data)


def decode_submit_answer(data: bytes) -> SubmitAnswer:
    """The answer to a submission; raises msgspec.DecodeError on anything else."""
    return _answer_decoder.decode(data)


def decode(data: bytes, kind: type[M]) -> M:
    """The `kind` that `data` encodes; raises msgspec.DecodeError on anything else."""
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    message = decoder.decode(data)
    assert isinstance(message, kind)
    return message
