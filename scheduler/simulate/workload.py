"""What is served in a simulation: recorded requests, and token ids made up to fit them."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scheduler.messages import PackedTokenIds

TOKENS_PER_PREFIX_ID = 512
"""Prompt tokens that one prefix id of a `TraceRequest` stands for, as in Mooncake's traces."""

ID_BITS = 31
ID_MASK = (1 << ID_BITS) - 1

MAX_PREFIX_IDS = (1 << ID_BITS) // TOKENS_PER_PREFIX_ID
"""Prefix ids are numbers below this one."""

_UINT = np.uint32


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a recorded workload: when, how long, and what its prompt shares.

    Two prompts are equal as far as their `prefix_ids` are; the last id may stand for fewer
    than `TOKENS_PER_PREFIX_ID` tokens. Without ids a prompt shares nothing with any other.
    """

    arrival_seconds: float
    prompt_tokens: int
    output_tokens: int
    prefix_ids: tuple[int, ...] = ()


def prompt_token_ids(request: TraceRequest, unique_from: int) -> PackedTokenIds:
    """The prompt of `request`.

    All tokens come from one fixed sequence of 2^31 different ids. A prefix id stands for its
    own stretch of it, so equal prefix ids give equal tokens and different ones below
    `MAX_PREFIX_IDS` share none. A prompt without prefix ids is the stretch at `unique_from`.
    """
    num_tokens = request.prompt_tokens
    if request.prefix_ids:
        starts = np.array(request.prefix_ids, np.uint32) * _UINT(TOKENS_PER_PREFIX_ID)
        offsets = np.arange(TOKENS_PER_PREFIX_ID, dtype=np.uint32)
        places = (starts[:, None] + offsets).ravel()[:num_tokens]
    else:
        places = np.arange(num_tokens, dtype=np.uint32) + _UINT(unique_from & ID_MASK)
    return _scatter(places).astype("<i4").tobytes()


def _scatter(ids: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """A bijection of 31-bit numbers, in place: odd factors and right shifts lose nothing."""
    ids &= _UINT(ID_MASK)
    for factor, shift in ((0x6C8E9CF5, 15), (0x5BD1E995, 13)):
        ids *= _UINT(factor)
        ids &= _UINT(ID_MASK)
        ids ^= ids >> _UINT(shift)
    return ids
