"""Messages as msgpack, and back."""

from typing import TypeVar

import msgspec

from scheduler.messages.base import Message
from scheduler.messages.requests import SubmitAnswer
from scheduler.messages.steps import WorkerMessage

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
