"""A language model whose KV cache is made of token ids.

The KV of one position is a *cell*, one integer

    | 34 bits: the tokens 0..p | 10 bits: position p | 8 bits: token p |

so a cell tells what was written and where it belongs, and equals another one only after the
same prefix, as the keys of a real model do. The next token is a function of every cell that
was read, of the seed and of the position: wrong KV gives wrong text.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from scheduler.messages import FinishReason, SamplingParams, TokenLogprobs

Cell: TypeAlias = int

VOCABULARY = 32
MAX_POSITIONS = 1024
UNWRITTEN: Cell = -1
START: Cell = 0
"""Stands before position 0."""

_TOKEN_BITS = 8
_PLACE_BITS = 18
_CHAIN_MASK = (1 << 34) - 1
_MASK_64 = (1 << 64) - 1


def next_cell(previous: Cell, position: int, token_id: int) -> Cell:
    chain = ((previous >> _PLACE_BITS) * 6364136223 + token_id + 1442695041) & _CHAIN_MASK
    return chain << _PLACE_BITS | position << _TOKEN_BITS | token_id


# All stages open the same tables, and many requests begin alike.
@lru_cache(maxsize=512)
def cells_of(token_ids: tuple[int, ...]) -> tuple[Cell, ...]:
    """The cells of a sequence that starts at position 0."""
    cells: list[Cell] = []
    cell = START
    for position, token_id in enumerate(token_ids):
        cell = next_cell(cell, position, token_id)
        cells.append(cell)
    return tuple(cells)


def describe_cell(cell: Cell) -> str:
    if cell == UNWRITTEN:
        return "nothing"
    token_id = cell & ((1 << _TOKEN_BITS) - 1)
    position = cell >> _TOKEN_BITS & (MAX_POSITIONS - 1)
    return f"token {token_id} at position {position} after prefix {cell >> _PLACE_BITS:#x}"


def _scramble(number: int) -> int:
    number = (number ^ number >> 31) * 0x9E3779B97F4A7C15 & _MASK_64
    number = (number ^ number >> 29) * 0xBF58476D1CE4E5B9 & _MASK_64
    return number ^ number >> 32


def stop_ids(sampling: SamplingParams) -> tuple[int, ...]:
    """The ids that end a request once it has `min_tokens`."""
    eos_token_ids = () if sampling.ignore_eos else sampling.eos_token_ids
    return eos_token_ids + sampling.stop_token_ids


def sample_token(
    digest: int, position: int, num_prompt_tokens: int, sampling: SamplingParams
) -> int:
    """The token for `position`. `digest` is the sum of the cells before it.

    Before `min_tokens` the ids that would end the request are masked.
    """
    token_id = _scramble(digest + sampling.seed * 7919 + position) % VOCABULARY
    if position - num_prompt_tokens < sampling.min_tokens:
        masked = sampling.eos_token_ids + sampling.stop_token_ids
        while token_id in masked:
            token_id = (token_id + 1) % VOCABULARY
    return token_id


def token_logprobs(previous: Cell, token_id: int, num_top: int) -> TokenLogprobs:
    """The row that rates `token_id` after the cell `previous`."""
    number = _scramble(previous + token_id)
    top = tuple((token, -token / 8.0) for token in range(num_top))
    return TokenLogprobs(-(number % 1000) / 100.0, number % VOCABULARY + 1, top)


def prompt_logprob_rows(
    cells: Sequence[Cell], token_ids: Sequence[int], first: int, end: int, num_top: int
) -> tuple[TokenLogprobs, ...]:
    """The rows of the prompt positions [first, end); first >= 1."""
    return tuple(
        token_logprobs(cells[position - 1], token_ids[position], num_top)
        for position in range(first, end)
    )


@dataclass(frozen=True, slots=True)
class SoloRun:
    """What one request yields alone on a pool that is large enough."""

    token_ids: tuple[int, ...]
    finish: FinishReason
    logprobs: tuple[TokenLogprobs, ...]
    """Empty unless asked for."""
    prompt_logprobs: tuple[TokenLogprobs, ...]
    """Positions 1 to the last of the prompt; empty unless asked for."""


def _generate(prompt: tuple[int, ...], sampling: SamplingParams) -> Iterator[tuple[Cell, int]]:
    cells = cells_of(prompt)
    digest = sum(cells)
    cell = cells[-1]
    position = len(prompt)
    while True:
        token_id = sample_token(digest, position, len(prompt), sampling)
        yield cell, token_id
        cell = next_cell(cell, position, token_id)
        digest += cell
        position += 1


def run_solo(prompt: tuple[int, ...], sampling: SamplingParams, max_model_len: int) -> SoloRun:
    """The undisturbed run: end-of-sequence, stop ids, then length."""
    max_tokens = min(sampling.max_tokens, max_model_len - len(prompt))
    stops = stop_ids(sampling)
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    finish = FinishReason.LENGTH
    for cell, token_id in _generate(prompt, sampling):
        token_ids.append(token_id)
        if sampling.logprobs is not None:
            logprobs.append(token_logprobs(cell, token_id, sampling.logprobs))
        if token_id in stops and len(token_ids) > sampling.min_tokens:
            finish = FinishReason.STOP
            break
        if len(token_ids) >= max_tokens:
            break
    rows: tuple[TokenLogprobs, ...] = ()
    if sampling.prompt_logprobs is not None:
        rows = prompt_logprob_rows(
            cells_of(prompt), prompt, 1, len(prompt), sampling.prompt_logprobs
        )
    return SoloRun(tuple(token_ids), finish, tuple(logprobs), rows)
