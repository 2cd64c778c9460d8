"""The sampling parameters of all open sequences, by row of the sequence table.

What is a number for every request stands in columns, so that a batch reads it with one index;
what only a few requests carry (lists of ids) stands in `constraints`, for those rows alone.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from scheduler.messages import SamplingParams
from worker.randomness import as_seed
from worker.sequence_table import Int64s

_COLUMNS = np.dtype(
    [
        ("temperature", np.float32),
        ("top_k", np.int64),  # 0: off
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("repetition_penalty", np.float32),
        ("presence_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("seed", np.uint64),
        ("min_tokens", np.int64),
        ("logprobs", np.int64),  # -1: none wanted
        ("prompt_logprobs", np.int64),  # -1: none wanted
        ("constrained", np.bool_),
    ]
)

Settings = np.ndarray
"""A structured array with the columns above, one entry per row asked for."""

_GREEDY_BELOW = 1e-5
"""Temperatures under it are greedy: dividing by them would overflow float32."""


@dataclass(frozen=True, slots=True)
class Constraints:
    """The lists of one request. Id tensors are int64 on the device."""

    bias_ids: Tensor | None
    bias: Tensor | None
    allowed_ids: Tensor | None
    stopping_ids: Tensor | None
    """Masked until `min_tokens` are generated."""
    bad_words: tuple[npt.NDArray[np.int32], ...]


class SamplingTable:
    """Grows with the sequence table; a row holds what was opened in it last."""

    def __init__(self, *, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._settings = np.zeros(0, _COLUMNS)
        self.constraints: dict[int, Constraints] = {}
        self.errors: dict[int, str] = {}
        """Rows whose parameters cannot be obeyed, and why: that request's own error."""

    def open(self, row: int, params: SamplingParams) -> None:
        """Take up the parameters of the sequence just opened in `row`."""
        if row >= len(self._settings):
            grown = np.zeros(max(16, 2 * row), _COLUMNS)
            grown[: len(self._settings)] = self._settings
            self._settings = grown
        self.constraints.pop(row, None)
        self.errors.pop(row, None)
        error = self._error(params)
        if error is not None:
            self.errors[row] = error
            params = SamplingParams(max_tokens=params.max_tokens, seed=0, temperature=0.0)
        constraints = self._constraints(params)
        if constraints is not None:
            self.constraints[row] = constraints
        greedy = params.temperature < _GREEDY_BELOW
        self._settings[row] = (
            0.0 if greedy else params.temperature,
            params.top_k,
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
            as_seed(params.seed),
            params.min_tokens,
            -1 if params.logprobs is None else params.logprobs,
            -1 if params.prompt_logprobs is None else params.prompt_logprobs,
            constraints is not None,
        )

    def settings(self, row_k: Int64s) -> Settings:
        """A copy of the columns of these rows."""
        return self._settings[row_k]

    def _error(self, params: SamplingParams) -> str | None:
        """Why no token can be chosen under `params`; the ingress refuses these first."""
        ids = {token_id for token_id, _ in params.logit_bias}
        ids.update(params.allowed_token_ids, params.stop_token_ids, *params.bad_words)
        wrong = [token_id for token_id in ids if not 0 <= token_id < self._vocab_size]
        if wrong:
            return (
                f"sampling parameters name token id {wrong[0]}, but the vocabulary ends at "
                f"{self._vocab_size - 1}"
            )
        if params.top_k < 0 or not 0 < params.top_p <= 1 or not 0 <= params.min_p <= 1:
            return (
                f"top_k {params.top_k}, top_p {params.top_p}, min_p {params.min_p}: "
                "top_k must be 0 or more, top_p in (0, 1], min_p in [0, 1]"
            )
        if params.repetition_penalty <= 0:
            return f"repetition_penalty {params.repetition_penalty} must be more than 0"
        return None

    def _constraints(self, params: SamplingParams) -> Constraints | None:
        stopping: tuple[int, ...] = ()
        if params.min_tokens > 0:
            stopping = params.stop_token_ids
            if not params.ignore_eos:
                stopping += tuple(i for i in params.eos_token_ids if 0 <= i < self._vocab_size)
        bad_words = tuple(np.array(word, np.int32) for word in params.bad_words if word)
        if not (params.logit_bias or params.allowed_token_ids or stopping or bad_words):
            return None
        bias_ids, bias = None, None
        if params.logit_bias:
            by_id = dict(params.logit_bias)
            bias_ids = torch.tensor(list(by_id), device=self._device)
            bias = torch.tensor(list(by_id.values()), dtype=torch.float32, device=self._device)
        return Constraints(
            bias_ids=bias_ids,
            bias=bias,
            allowed_ids=self._ids(params.allowed_token_ids),
            stopping_ids=self._ids(stopping),
            bad_words=bad_words,
        )

    def _ids(self, token_ids: Iterable[int]) -> Tensor | None:
        unique = sorted(set(token_ids))
        return torch.tensor(unique, device=self._device) if unique else None
