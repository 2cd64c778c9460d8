"""The closed set of messages, and what happens to bytes that are not one of them."""

import copy
import inspect
import pickle
import random

import msgspec
import pytest

from scheduler import errors, messages
from scheduler.messages import (
    AbortRequests,
    Accepted,
    BadRequest,
    Close,
    CloseReason,
    Counts,
    EndReason,
    EndRequest,
    EngineInfo,
    EngineState,
    Extend,
    FinishReason,
    Gauges,
    Heartbeat,
    HistogramCounts,
    InterruptionCause,
    Interruptions,
    JoinGroup,
    Message,
    NeverFits,
    Open,
    PollAnswer,
    PromptLogprobs,
    QueueFull,
    SamplingParams,
    SeqOutput,
    SeqRef,
    SeqWork,
    StepPlan,
    StepResult,
    SubmitRequest,
    SubmitRequests,
    Tally,
    TallyAnswer,
    TokenBatch,
    TokenDelta,
    TokenLogprobs,
    Unavailable,
    Usage,
    WorkerFault,
    WorkerHello,
    decode,
    encode,
    pack_token_ids,
    unpack_token_ids,
)

SEQ = SeqRef("cmpl-ü/0", 3)
SAMPLING = SamplingParams(
    max_tokens=7,
    seed=2**64 - 1,
    min_tokens=2,
    temperature=0.5,
    top_k=40,
    top_p=0.9,
    min_p=0.05,
    repetition_penalty=1.1,
    presence_penalty=-2.0,
    frequency_penalty=2.0,
    logit_bias=((5, -100.0), (6, 1.5)),
    allowed_token_ids=(1, 2, 3),
    bad_words=((1,), (2, 3)),
    eos_token_ids=(2,),
    stop_token_ids=(7, 8),
    ignore_eos=True,
    logprobs=0,
    prompt_logprobs=3,
)
USAGE = Usage(
    prompt_tokens=5,
    completion_tokens=2,
    cached_tokens=16,
    interruptions=Interruptions(
        causes={InterruptionCause.BLOCKS: 2, InterruptionCause.WORKER_LOST: 1},
        recovered_tokens=32,
        recomputed_tokens=7,
        stalled_seconds=1.5,
    ),
)
ROW = TokenLogprobs(-0.5, 2, ((9, -0.1), (4, -0.5)))
PACKED = pack_token_ids([1, 2, 300_000])
OPEN = Open(SEQ, PACKED, 2, (7, 3, 12), 16, SAMPLING)
EXTEND = Extend(SEQ, (4,), (13,))
CLOSE = Close(SEQ, CloseReason.PREEMPTED)
WORK = SeqWork(SEQ, 16, 5, sample=True)
OUTPUT = SeqOutput(SEQ, (11,), (ROW,), PromptLogprobs(1, (ROW,)), error="no finite probability")
DELTA = TokenDelta("r", (1,), (ROW,), (ROW, ROW), FinishReason.STOP, USAGE, "broken")
INFO = EngineInfo(EngineState.STARTING, "loading", 1, 8192, 49152, 16, 100, 2, 3, 40, 12.5)

COUNTS = Counts(
    version=3,
    counters={"preemptions_total": {"blocks": 2**40, "drain": 0}},
    histograms={"request_preemptions": {"": HistogramCounts((3, 0, 1), 7.5)}},
)
TALLY = Tally({"ingress-1": COUNTS}, Counts(0, {}, {}), ("ingress-0",))
GAUGES = Gauges(1, 2, 3, 4, 5, 6, 7, 8)
EXAMPLES: tuple[Message, ...] = (
    SAMPLING,
    SEQ,
    USAGE.interruptions or Interruptions({}),
    USAGE,
    ROW,
    PromptLogprobs(1, (ROW, ROW)),
    SubmitRequest("r", "client", PACKED, SAMPLING, 1.5, -3, "salt", PACKED, USAGE, "theirs"),
    SubmitRequests((SubmitRequest("r", "client", PACKED, SAMPLING, 1.5),)),
    EndRequest("r", EndReason.SLOW_CLIENT, 4),
    AbortRequests(("cmpl-1", "theirs")),
    Unavailable("the workers are joining"),
    Accepted(),
    QueueFull("full"),
    NeverFits("too large", 160),
    BadRequest("empty", "prompt"),
    OPEN,
    EXTEND,
    CLOSE,
    WORK,
    StepPlan(1, 2, (OPEN, EXTEND, CLOSE), (WORK,)),
    OUTPUT,
    StepResult(1, 2, (OUTPUT,), 0.25, 0.125),
    WorkerFault(1, 2, 3, "MirrorDriftError", "starts at 4, expected 5"),
    Heartbeat(1, 2, 3),
    JoinGroup(1, 2, "127.0.0.1", "127.0.0.2", 29500, "epoch-1"),
    WorkerHello(1, 2, 100, 4096, "digest", 49152, 8192),
    DELTA,
    TokenBatch(2, (DELTA,)),
    INFO,
    PollAnswer(4, (TokenBatch(2, (DELTA,)),), INFO, is_new=True),
    COUNTS.histograms["request_preemptions"][""],
    COUNTS,
    TALLY,
    GAUGES,
    TallyAnswer(TALLY, GAUGES),
)


def test_every_message_type_has_an_example() -> None:
    """So that a new one cannot be left out of the tests below."""
    types = {
        kind
        for _, kind in inspect.getmembers(messages, inspect.isclass)
        if issubclass(kind, Message) and kind is not Message
    }
    assert types == {type(example) for example in EXAMPLES}


def test_no_field_of_an_example_has_its_default() -> None:
    """Else a round trip could lose the field and nobody would notice."""
    for example in EXAMPLES:
        for field in msgspec.structs.fields(example):
            if field.default is not msgspec.NODEFAULT:
                value = getattr(example, field.name)
                assert value != field.default, f"{type(example).__name__}.{field.name}"


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_message_survives_the_wire(message: Message) -> None:
    there = decode(encode(message), type(message))
    assert there == message
    assert type(there) is type(message)
    for field in msgspec.structs.fields(message):
        assert type(getattr(there, field.name)) is type(getattr(message, field.name))


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_message_survives_pickling_and_copying(message: Message) -> None:
    """Remote calls pickle."""
    assert pickle.loads(pickle.dumps(message)) == message
    assert copy.deepcopy(message) == message


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_message_cannot_be_changed(message: Message) -> None:
    fields = msgspec.structs.fields(message)
    for field in fields:
        with pytest.raises(AttributeError):
            setattr(message, field.name, None)
    assert not hasattr(message, "__dict__")


@pytest.mark.parametrize("update", [OPEN, EXTEND, CLOSE], ids=lambda m: type(m).__name__)
def test_update_keeps_its_kind_within_a_plan(update: Open | Extend | Close) -> None:
    plan = StepPlan(0, 0, (update,), ())
    assert type(decode(encode(plan), StepPlan).updates[0]) is type(update)


def test_defaults_may_be_left_out() -> None:
    """A message from a build that did not know the last fields yet."""
    assert decode(msgspec.msgpack.encode(["StepResult", 1, 2, []]), StepResult) == StepResult(
        1, 2, ()
    )


# -- what is refused --------------------------------------------------------------------


def raw(message: Message) -> list[object]:
    fields = msgspec.msgpack.decode(encode(message))
    assert isinstance(fields, list)
    return fields


def test_unknown_update_is_refused() -> None:
    fields = raw(StepPlan(0, 0, (CLOSE,), ()))
    fields[2][0][0] = "Swap"  # type: ignore[index]
    with pytest.raises(msgspec.ValidationError, match="Swap"):
        decode(msgspec.msgpack.encode(fields), StepPlan)


def test_unknown_reason_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="evicted"):
        decode(msgspec.msgpack.encode(["Close", ["r", 1], "evicted"]), Close)


def test_message_of_another_type_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        decode(encode(StepResult(1, 2, ())), SubmitRequest)


def test_wrong_type_of_a_field_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        decode(msgspec.msgpack.encode(["0", 0, [], []]), StepPlan)


def test_missing_field_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        decode(msgspec.msgpack.encode([0, 0, []]), StepPlan)


def test_field_too_many_is_refused() -> None:
    """The set is closed: nobody shall send what nobody reads."""
    with pytest.raises(msgspec.ValidationError):
        decode(msgspec.msgpack.encode([*raw(StepPlan(0, 0, (), ())), 1]), StepPlan)


@pytest.mark.parametrize(
    "garbage",
    [b"", b"\xc1", b"\x00", b"not msgpack", b"\x94\x00\x00", encode(WORK) + b"\x00"],
    ids=["nothing", "never used opcode", "a number", "text", "cut off", "one byte too many"],
)
def test_garbage_is_refused_with_the_documented_error(garbage: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode(garbage, SeqWork)


def test_deep_nesting_is_refused_with_the_documented_error() -> None:
    """Not with a RecursionError, which nobody who reads a socket expects."""
    bomb = b"\x91" * 100_000 + b"\xc0"
    inside = b"\x95" + encode(StepPlan(0, 0, (), ()))[1:] + bomb
    for data in (bomb, inside):
        with pytest.raises(msgspec.DecodeError):
            decode(data, StepPlan)


def test_damaged_bytes_are_refused_with_the_documented_error_or_read_as_a_message() -> None:
    rng = random.Random(5)
    whole = encode(StepPlan(1, 2, (OPEN, EXTEND, CLOSE), (WORK,)))
    refused = 0
    for _ in range(3000):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            assert isinstance(decode(bytes(data), StepPlan), StepPlan)
        except msgspec.DecodeError:
            refused += 1
    assert refused > 1000


# -- token ids --------------------------------------------------------------------------


@pytest.mark.parametrize("token_ids", [[], [0], [1, 2, 3], [2**31 - 1, 0, 128_000]])
def test_packed_token_ids_come_back(token_ids: list[int]) -> None:
    assert list(unpack_token_ids(pack_token_ids(token_ids))) == token_ids


def test_packed_token_ids_are_little_endian_int32() -> None:
    assert pack_token_ids([1, 258]) == b"\x01\x00\x00\x00\x02\x01\x00\x00"


def test_token_id_of_more_than_31_bits_is_an_error() -> None:
    with pytest.raises(OverflowError):
        pack_token_ids([2**31])


def test_packed_token_ids_of_a_broken_length_are_an_error() -> None:
    with pytest.raises(ValueError, match="multiple"):
        unpack_token_ids(b"\x01\x00\x00")


# -- errors -----------------------------------------------------------------------------

ERRORS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, errors.SchedulerError)
]


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_error_survives_pickling(kind: type[errors.SchedulerError]) -> None:
    there = pickle.loads(pickle.dumps(kind("7 blocks asked for, 5 are free")))
    assert type(there) is kind
    assert str(there) == "7 blocks asked for, 5 are free"


def test_interruptions_count_all_causes() -> None:
    assert USAGE.interruptions is not None
    assert USAGE.interruptions.count == 3
