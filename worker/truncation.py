"""Top-k and top-p: what of a distribution is kept, and a draw from it.

Descending by (logit, -id), top-k keeps the first k ids and top-p the shortest beginning whose
mass within them reaches p. The likeliest 64 or 1,024 settle nearly every row. A row that they do
not settle sorts all its exponents, without their ids, to find where the border is.

Weights are exp(exponent), with exponents of at most 0; an exponent of -inf is masked already.
Shape letters: n rows, m of them not settled, l entries of a list, V vocabulary.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_SHORT_LIST = 64
_LONG_LIST = 1024


def draw_by_mass(weight_nV: Tensor, u_n1: Tensor) -> Tensor:
    """The first id whose cumulative weight exceeds u times all weight, for each row.

    In float64: a float32 sum over 49,152 ids would move the borders by more than a weight. An
    id without weight is never drawn, because u < 1 has 52 bits.
    """
    mass_nV = weight_nV.cumsum(dim=-1, dtype=torch.float64)
    id_n1 = torch.searchsorted(mass_nV, u_n1 * mass_nV[:, -1:], right=True)
    return id_n1[:, 0].clamp_(max=mass_nV.shape[1] - 1)


def draw_truncated(
    exponent_nV: Tensor,
    u_n1: Tensor,
    *,
    top_k: npt.NDArray[np.int64],
    top_p: npt.NDArray[np.float64],
) -> Tensor:
    """One id per row from what its top_k (0: all) and top_p keep."""
    vocab_size = exponent_nV.shape[1]
    top_k = np.where(top_k > 0, top_k, vocab_size).clip(max=vocab_size)
    top_k_n1 = torch.from_numpy(top_k).to(u_n1.device)[:, None]
    # top_p 1 keeps all, also what rounding would put beyond the sum.
    top_p_n1 = torch.from_numpy(np.where(top_p < 1, top_p, np.inf)).to(u_n1.device)[:, None]
    length = min(_SHORT_LIST if top_k.max() < _SHORT_LIST else _LONG_LIST, vocab_size)
    top_nl, id_nl = _in_order(*torch.topk(exponent_nV, length, dim=-1))
    total_n1 = torch.full_like(u_n1, torch.inf)
    if top_k.max() > length or length == vocab_size:
        total_n1 = exponent_nV.exp().sum(dim=-1, keepdim=True, dtype=torch.float64)
    kept_nl, settled_n = _kept_of_list(top_nl, total_n1, top_k_n1, top_p_n1, vocab_size)
    id_nl, order_nl = id_nl.sort(dim=-1)
    weight_nl = top_nl.exp().masked_fill_(~kept_nl, 0.0).gather(1, order_nl)
    token_id_n = id_nl.gather(1, draw_by_mass(weight_nl, u_n1)[:, None])[:, 0]
    if not bool(settled_n.all()):
        left = (~settled_n).nonzero()[:, 0]
        exponent_mV = exponent_nV[left]
        kept_mV = _kept_of_all(exponent_mV, top_k_n1[left], top_p_n1[left])
        weight_mV = exponent_mV.exp().masked_fill_(~kept_mV, 0.0)
        token_id_n[left] = draw_by_mass(weight_mV, u_n1[left])
    return token_id_n


def _in_order(exponent_nl: Tensor, id_nl: Tensor) -> tuple[Tensor, Tensor]:
    """Descending by exponent; among equals the smaller id first, which topk leaves open."""
    if not bool((exponent_nl[:, 1:] == exponent_nl[:, :-1]).any()):
        return exponent_nl, id_nl
    id_nl, by_id_nl = id_nl.sort(dim=-1)
    exponent_nl, order_nl = exponent_nl.gather(1, by_id_nl).sort(
        dim=-1, descending=True, stable=True
    )
    return exponent_nl, id_nl.gather(1, order_nl)


def _kept_of_list(
    exponent_nl: Tensor, total_n1: Tensor, top_k_n1: Tensor, top_p_n1: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """What is kept of the l likeliest, and for which rows that is all that is kept."""
    length = exponent_nl.shape[1]
    place_1l = torch.arange(length, device=exponent_nl.device)[None, :]
    weight_nl = exponent_nl.exp().double().masked_fill_(place_1l >= top_k_n1, 0.0)
    mass_nl = weight_nl.cumsum(dim=-1)
    total_n1 = torch.where(top_k_n1 <= length, mass_nl[:, -1:], total_n1)
    kept_nl = (mass_nl - weight_nl < top_p_n1 * total_n1) & (weight_nl > 0)
    last_n1 = (kept_nl.sum(dim=-1, keepdim=True) - 1).clamp_(min=0)
    # Equals of the last one kept may stand beyond the list, with smaller ids.
    end_n1 = exponent_nl[:, -1:]
    settled_n1 = (exponent_nl.gather(1, last_n1) > end_n1) | (end_n1 == -torch.inf)
    settled_n1 |= torch.tensor(length == vocab_size, device=settled_n1.device)
    # The total under a top-k beyond the list is not known here.
    settled_n1 &= (top_k_n1 <= length) | (top_k_n1 == vocab_size)
    return kept_nl, settled_n1[:, 0]


def _kept_of_all(exponent_mV: Tensor, top_k_m1: Tensor, top_p_m1: Tensor) -> Tensor:
    """What is kept of all ids."""
    sorted_mV = _descending(exponent_mV)
    vocab_size = sorted_mV.shape[1]
    kept_mV, _ = _kept_of_list(sorted_mV, top_p_m1, top_k_m1, top_p_m1, vocab_size)
    count_m1 = kept_mV.sum(dim=-1, keepdim=True)
    border_m1 = sorted_mV.gather(1, (count_m1 - 1).clamp(min=0))
    above_mV, at_border_mV = exponent_mV > border_m1, exponent_mV == border_m1
    # Of those that equal the last one kept, the smaller ids come first.
    free_m1 = count_m1 - above_mV.sum(dim=-1, keepdim=True)
    return above_mV | (at_border_mV & (at_border_mV.cumsum(dim=-1) <= free_m1))


def _descending(x_mV: Tensor) -> Tensor:
    if x_mV.device.type != "cpu":
        return x_mV.sort(dim=-1, descending=True).values
    # numpy sorts floats with vector instructions: 0.4 ms for 49,152 of them, torch needs 14.
    return torch.from_numpy(np.sort(x_mV.numpy(), axis=-1)).flip(-1)
