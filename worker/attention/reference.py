"""The oracle: one sequence at a time, every step written out. Clear and slow."""

import torch
from torch import Tensor

from worker.attention.base import AttentionBatch, AttentionRule, LayerCache
from worker.kv_cache import store


class ReferenceAttention:
    """Works on every device and dtype."""

    name = "reference"

    def attend(
        self,
        q_tHD: Tensor,
        k_tGD: Tensor,
        v_tGD: Tensor,
        cache: LayerCache,
        batch: AttentionBatch,
        rule: AttentionRule,
    ) -> Tensor:
        store(cache, batch.slot_t, k_tGD, v_tGD)
        out_tHD = torch.empty_like(q_tHD, memory_format=torch.contiguous_format)
        query_starts = batch.query_start_s1.tolist()
        for s, kv_len in enumerate(batch.kv_len_s.tolist()):
            begin, end = query_starts[s], query_starts[s + 1]
            blocks = batch.block_ids_sb[s, : -(-kv_len // cache.block_size)].long()
            k_nGD = cache.k_NBGD[blocks].flatten(0, 1)[:kv_len].float() * cache.k_scale
            v_nGD = cache.v_NBGD[blocks].flatten(0, 1)[:kv_len].float() * cache.v_scale
            out_tHD[begin:end] = _attend_one(q_tHD[begin:end].float(), k_nGD, v_nGD, rule)
        return out_tHD


def _attend_one(q_mHD: Tensor, k_nGD: Tensor, v_nGD: Tensor, rule: AttentionRule) -> Tensor:
    """The last m of n positions look at what they may see: [m, H, D], float32."""
    num_queries, num_keys = len(q_mHD), len(k_nGD)
    group = q_mHD.shape[1] // k_nGD.shape[1]
    k_nHD = k_nGD.repeat_interleave(group, dim=1)
    v_nHD = v_nGD.repeat_interleave(group, dim=1)
    score_Hmn = torch.einsum("mhd,nhd->hmn", q_mHD, k_nHD) * rule.scale
    if rule.softcap is not None:
        score_Hmn = rule.softcap * torch.tanh(score_Hmn / rule.softcap)
    query_m1 = torch.arange(num_keys - num_queries, num_keys, device=q_mHD.device)[:, None]
    key_1n = torch.arange(num_keys, device=q_mHD.device)[None, :]
    seen_mn = key_1n <= query_m1
    if rule.window is not None:
        seen_mn &= key_1n > query_m1 - rule.window
    weight_Hmn = score_Hmn.masked_fill(~seen_mn, float("-inf")).softmax(dim=-1)
    return torch.einsum("hmn,nhd->mhd", weight_Hmn, v_nHD)
