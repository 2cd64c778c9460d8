"""Attention without pages, for tests of models alone: clear, slow, float32."""

import math

import torch
from torch import Tensor

from worker.models.base import Attend, Decoder


class DenseCache:
    """K and V of some sequences, each as one growing tensor per layer."""

    def __init__(self) -> None:
        self._kv: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def attend(self, lengths: dict[int, int]) -> Attend:
        """For a flat batch of the next `lengths[seq]` tokens of each sequence, in this order."""

        def attend(
            layer: int,
            q_tHD: Tensor,
            k_tGD: Tensor,
            v_tGD: Tensor,
            *,
            scale: float | None = None,
            window: int | None = None,
            softcap: float | None = None,
        ) -> Tensor:
            sizes = list(lengths.values())
            parts = zip(*(x.float().split(sizes) for x in (q_tHD, k_tGD, v_tGD)), strict=True)
            outputs = []
            for seq, (q, k, v) in zip(lengths, parts, strict=True):
                if (seq, layer) in self._kv:
                    old_k, old_v = self._kv[seq, layer]
                    k, v = torch.cat((old_k, k)), torch.cat((old_v, v))
                self._kv[seq, layer] = k, v
                outputs.append(_attend_one(q, k, v, scale, window, softcap))
            return torch.cat(outputs).to(q_tHD.dtype)

        return attend


def _attend_one(
    q_tHD: Tensor,
    k_nGD: Tensor,
    v_nGD: Tensor,
    scale: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """The last t of n positions attend to all n."""
    group = q_tHD.shape[1] // k_nGD.shape[1]
    k_nHD, v_nHD = (x.repeat_interleave(group, dim=1) for x in (k_nGD, v_nGD))
    scores_Htn = torch.einsum("thd,nhd->htn", q_tHD, k_nHD)
    scores_Htn *= 1 / math.sqrt(q_tHD.shape[-1]) if scale is None else scale
    if softcap is not None:
        scores_Htn = softcap * torch.tanh(scores_Htn / softcap)
    num_keys = k_nHD.shape[0]
    key_n = torch.arange(num_keys)
    distance_tn = key_n[num_keys - q_tHD.shape[0] :, None] - key_n
    hidden_tn = distance_tn < 0
    if window is not None:
        hidden_tn = hidden_tn | (distance_tn >= window)
    weights_Htn = scores_Htn.masked_fill(hidden_tn, -torch.inf).softmax(-1)
    return torch.einsum("htn,nhd->thd", weights_Htn, v_nHD)


def logits_of(decoders: list[Decoder], steps: list[dict[int, list[int]]]) -> dict[int, Tensor]:
    """Run the stages in `decoders` over `steps`; the logits of every position, by sequence.

    A step is one flat batch: the next token ids of each sequence in it.
    """
    caches = [DenseCache() for _ in decoders]
    done: dict[int, int] = {}
    rows: dict[int, list[Tensor]] = {}
    with torch.inference_mode():
        for step in steps:
            lengths = {seq: len(ids) for seq, ids in step.items()}
            positions = [done.get(seq, 0) + i for seq, n in lengths.items() for i in range(n)]
            position_ids_t = torch.tensor(positions)
            hidden_tE = decoders[0].embed(torch.tensor([i for ids in step.values() for i in ids]))
            for decoder, cache in zip(decoders, caches, strict=True):
                hidden_tE = decoder.layers(hidden_tE, position_ids_t, cache.attend(lengths))
            logits_tV = decoders[-1].logits(hidden_tE)
            for (seq, n), part_nV in zip(
                lengths.items(), logits_tV.split(list(lengths.values())), strict=True
            ):
                done[seq] = done.get(seq, 0) + n
                rows.setdefault(seq, []).append(part_nV)
    return {seq: torch.cat(parts) for seq, parts in rows.items()}
