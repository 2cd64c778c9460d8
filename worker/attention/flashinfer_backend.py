"""FlashInfer's paged attention, where it is installed."""

import flashinfer
import torch
from torch import Tensor

from worker.attention.base import AttentionBatch, AttentionRule, LayerCache
from worker.kv_cache import store

_WORKSPACE_BYTES = 128 << 20


class FlashInferAttention:
    """Plans once per batch and rule, because a plan costs a copy to the host and back."""

    name = "flashinfer"

    def __init__(self, device: torch.device) -> None:
        workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        self._planned: tuple[AttentionBatch, AttentionRule] | None = None

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
        planned = self._planned
        if planned is None or planned[0] is not batch or planned[1] != rule:
            self._plan(q_tHD, cache, batch, rule)
            self._planned = (batch, rule)
        out_tHD = self._wrapper.run(
            q_tHD.contiguous(),
            (cache.k_NBGD, cache.v_NBGD),
            k_scale=cache.k_scale,
            v_scale=cache.v_scale,
        )
        assert isinstance(out_tHD, Tensor)
        return out_tHD

    def _plan(
        self, q_tHD: Tensor, cache: LayerCache, batch: AttentionBatch, rule: AttentionRule
    ) -> None:
        _, num_heads, head_dim = q_tHD.shape
        block_size, num_kv_heads = cache.block_size, cache.k_NBGD.shape[2]
        blocks_s = (batch.kv_len_s + block_size - 1) // block_size
        indptr_s1 = torch.zeros_like(batch.query_start_s1)
        indptr_s1[1:] = blocks_s.cumsum(0)
        used_sb = (
            torch.arange(batch.block_ids_sb.shape[1], device=q_tHD.device)[None] < blocks_s[:, None]
        )
        self._wrapper.plan(
            batch.query_start_s1,
            indptr_s1,
            batch.block_ids_sb[used_sb],
            batch.kv_len_s - (blocks_s - 1) * block_size,
            num_heads,
            num_kv_heads,
            head_dim,
            block_size,
            causal=True,
            sm_scale=rule.scale,
            window_left=-1 if rule.window is None else rule.window - 1,
            logits_soft_cap=rule.softcap,
            q_data_type=q_tHD.dtype,
            kv_data_type=cache.k_NBGD.dtype,
        )
