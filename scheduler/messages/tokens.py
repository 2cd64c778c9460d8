"""Token ids on their way, and how a model rates them.

Token ids have two shapes. A whole prompt travels *packed* (`pack_token_ids`: little-endian
int32, as every machine that Ray runs on stores it), because msgpack needs milliseconds for
128,000 integers and next to nothing for a copy; the few ids of one step travel as a tuple.
"""

from array import array
from collections.abc import Iterable
from typing import TypeAlias

from scheduler.messages.base import Message

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
