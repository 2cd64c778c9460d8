"""Chooses the next token of every sequence of a batch.

A row's token depends on its logits, its parameters, its tokens and one random number, never on
the other rows. A random row draws by inverting the cumulative distribution of what it keeps, in
the order of ids. `worker.truncation` says what top-k and top-p keep.
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from scheduler.messages import TokenLogprobs
from worker.logits import adjust
from worker.logprobs import token_logprobs
from worker.randomness import uniforms
from worker.sampling_table import SamplingTable, Settings
from worker.sequence_table import Int64s, SequenceTable
from worker.truncation import draw_by_mass, draw_truncated

Float64s: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Sampled:
    """One entry per sampled row."""

    token_id_k: Int64s
    """0 where there is an error, so that plans in flight go on; the scheduler drops it."""
    logprobs: list[TokenLogprobs | None]
    errors: list[str | None]


class Sampler:
    """One per rank that samples: tensor-parallel rank 0 of the last stage."""

    def __init__(self, sampling: SamplingTable, table: SequenceTable) -> None:
        self._sampling = sampling
        self._table = table

    def sample(self, logits_kV: Tensor, row_k: Int64s) -> Sampled:
        """The token after the last known one of each row. Changes `logits_kV`."""
        logits_kV = logits_kV.contiguous()
        settings_k = self._sampling.settings(row_k)
        wanted = np.flatnonzero(settings_k["logprobs"] >= 0)
        at_w = torch.from_numpy(wanted).to(logits_kV.device)
        raw_wV = logits_kV[at_w] if len(wanted) else None
        adjust(logits_kV, row_k, settings_k, self._sampling, self._table)
        best_k, token_id_k = logits_kV.max(dim=-1)
        drawn = np.flatnonzero(settings_k["temperature"] > 0)
        if len(drawn):
            at = torch.from_numpy(drawn).to(logits_kV.device)
            uniform = uniforms(settings_k["seed"][drawn], self._table.num_tokens[row_k[drawn]])
            token_id_k[at] = _draw(logits_kV[at], best_k[at], settings_k[drawn], uniform)
        errors = self._errors(row_k, best_k.cpu().numpy())
        for k, error in enumerate(errors):
            if error is not None:
                token_id_k[k] = 0
        logprobs: list[TokenLogprobs | None] = [None] * len(row_k)
        if raw_wV is not None:
            rated = token_logprobs(raw_wV, token_id_k[at_w], settings_k["logprobs"][wanted])
            for k, entry in zip(wanted.tolist(), rated, strict=True):
                logprobs[k] = entry
        return Sampled(token_id_k.cpu().numpy(), logprobs, errors)

    def _errors(self, row_k: Int64s, best_k: Float64s) -> list[str | None]:
        errors = [self._sampling.errors.get(int(row)) for row in row_k]
        for k in np.flatnonzero(~np.isfinite(best_k)):
            if errors[k] is None:
                errors[k] = (
                    "allowed_token_ids, bad_words, logit_bias and min_tokens leave no token"
                    if best_k[k] == -np.inf
                    else "the model gave no finite logits for this request"
                )
        return errors


def _draw(
    logits_nV: Tensor,
    best_n: Tensor,
    settings_n: Settings,
    uniform_n: Float64s,
) -> Tensor:
    """One token id per row at its temperature; rows without a finite maximum give any id."""
    device = logits_nV.device
    temperature_n1 = torch.from_numpy(settings_n["temperature"].copy()).to(device)[:, None]
    best_n = torch.where(best_n.isfinite(), best_n, torch.zeros_like(best_n))
    # The exponent of each weight: 0 for the likeliest. exp() of it cannot overflow.
    exponent_nV = (logits_nV - best_n[:, None]).div_(temperature_n1)
    u_n1 = torch.from_numpy(uniform_n).to(device)[:, None]
    with np.errstate(divide="ignore"):
        floor_n1 = torch.from_numpy(np.log(settings_n["min_p"])).to(device)[:, None]
    exponent_nV.masked_fill_(exponent_nV < floor_n1, float("-inf"))

    cut = (settings_n["top_k"] > 0) | (settings_n["top_p"] < 1)
    if not cut.any():
        return draw_by_mass(exponent_nV.exp(), u_n1)
    token_id_n = torch.empty(len(cut), dtype=torch.int64, device=device)
    whole = torch.from_numpy(np.flatnonzero(~cut)).to(device)
    if len(whole):
        token_id_n[whole] = draw_by_mass(exponent_nV[whole].exp(), u_n1[whole])
    part = torch.from_numpy(np.flatnonzero(cut)).to(device)
    token_id_n[part] = draw_truncated(
        exponent_nV[part] if len(whole) else exponent_nV,
        u_n1[part],
        top_k=settings_n["top_k"][cut],
        top_p=settings_n["top_p"][cut],
    )
    return token_id_n
