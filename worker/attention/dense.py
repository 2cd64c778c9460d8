"""Long stretches of a prompt on a CPU with matrix units for bfloat16: K and V are gathered from
their blocks, and torch's kernel for whole sequences does the rest on those units, in half the time
of ours.

Shape letters as in `worker.attention.base`; m queries and n keys of one sequence.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.attention.base import AttentionBatch, AttentionRule, LayerCache

MIN_QUERIES = 128
"""Gathering is not worth it for fewer."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """The queries of one sequence, `MIN_QUERIES` or more."""

    begin: int
    """In the flat batch."""
    end: int
    num_keys: int
    block_ids_b: Tensor
    """int64."""
    mask_mn: Tensor | None
    """What is added to the scores; None: query i sees keys 0 .. i."""


def can_attend(q_tHD: Tensor, cache: LayerCache, rule: AttentionRule) -> bool:
    is_plain = rule.window is None and rule.softcap is None
    return is_plain and q_tHD.dtype == cache.k_NBGD.dtype == torch.bfloat16


def stretches_of(batch: AttentionBatch, block_size: int) -> list[Stretch]:
    if batch.max_query_tokens < MIN_QUERIES:
        return []
    starts = batch.query_start_s1.tolist()
    found = []
    for s, num_keys in enumerate(batch.kv_len_s.tolist()):
        begin, end = starts[s], starts[s + 1]
        if end - begin >= MIN_QUERIES:
            block_ids_b = batch.block_ids_sb[s, : -(-num_keys // block_size)].long()
            found.append(Stretch(begin, end, num_keys, block_ids_b, _mask(end - begin, num_keys)))
    return found


def _mask(num_queries: int, num_keys: int) -> Tensor | None:
    if num_queries == num_keys:
        return None
    mask_mn = torch.full((num_queries, num_keys), float("-inf"), dtype=torch.bfloat16)
    return mask_mn.triu_(num_keys - num_queries + 1)


def attend(stretch: Stretch, q_tHD: Tensor, cache: LayerCache, rule: AttentionRule) -> Tensor:
    """[m, H, D]. K and V are stored."""
    q_mHD = q_tHD[stretch.begin : stretch.end]
    k_nGD, v_nGD = (
        pages_NBGD[stretch.block_ids_b].flatten(0, 1)[: stretch.num_keys]
        for pages_NBGD in (cache.k_NBGD, cache.v_NBGD)
    )
    out_HmD = F.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q_mHD, k_nGD, v_nGD)),
        attn_mask=stretch.mask_mn,
        is_causal=stretch.mask_mn is None,
        scale=rule.scale,
        enable_gqa=True,
    )[0]
    return out_HmD.transpose(0, 1)
