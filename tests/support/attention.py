"""Made-up sequences over a paged cache, and attention computed from the definition in float64."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker.attention.base import AttentionBatch, AttentionRule, LayerCache
from worker.kv_cache import FP8, quantized


@dataclass(frozen=True)
class Piece:
    """A sequence of `kv_len` tokens whose last `num_queries` are new."""

    kv_len: int
    num_queries: int


@dataclass
class Case:
    """One call of a backend. `cache` holds what was computed earlier, and junk elsewhere."""

    q_tHD: Tensor
    k_tGD: Tensor
    v_tGD: Tensor
    cache: LayerCache
    batch: AttentionBatch
    pieces: tuple[Piece, ...]
    tables: tuple[Tensor, ...]
    device: torch.device

    def expected(self, rule: AttentionRule) -> Tensor:
        """[t, H, D] in float64, from K and V as the cache rounds them."""
        block_size = self.cache.block_size
        k_NGD = self.cache.k_NBGD.cpu().float().flatten(0, 1)
        v_NGD = self.cache.v_NBGD.cpu().float().flatten(0, 1)
        slots = self.batch.slot_t.cpu()
        for pages, new, scale in (
            (k_NGD, self.k_tGD, self.cache.k_scale),
            (v_NGD, self.v_tGD, self.cache.v_scale),
        ):
            pages[slots] = quantized(new.cpu(), self.cache.k_NBGD.dtype, scale).float()
        out, begin = [], 0
        for piece, table in zip(self.pieces, self.tables, strict=True):
            at = torch.arange(piece.kv_len)
            at = table[at // block_size].long() * block_size + at % block_size
            q_mHD = self.q_tHD[begin : begin + piece.num_queries].cpu().double()
            k_nGD = k_NGD[at].double() * self.cache.k_scale
            v_nGD = v_NGD[at].double() * self.cache.v_scale
            out.append(_attention(q_mHD, k_nGD, v_nGD, rule))
            begin += piece.num_queries
        return torch.cat(out)


def make_case(
    pieces: Sequence[Piece],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    scales: tuple[float, float] = (1.0, 1.0),
    seed: int = 0,
    device: str = "cpu",
    shared_blocks: int = 0,
) -> Case:
    """Random values; tables of shuffled blocks, the first `shared_blocks` common to all."""
    rng = torch.Generator().manual_seed(seed)
    needed = [-(-piece.kv_len // block_size) for piece in pieces]
    num_blocks = 1 + shared_blocks + sum(n - shared_blocks for n in needed)
    order = (torch.randperm(num_blocks - 1, generator=rng) + 1).int()
    shared, rest = order[:shared_blocks], order[shared_blocks:]
    tables = []
    for own in (n - shared_blocks for n in needed):
        tables.append(torch.cat([shared, rest[:own]]))
        rest = rest[own:]
    block_ids_sb = torch.zeros(len(pieces), max(needed), dtype=torch.int32)
    for s, table in enumerate(tables):
        block_ids_sb[s, : len(table)] = table
    at = [
        table[positions // block_size].long() * block_size + positions % block_size
        for piece, table in zip(pieces, tables, strict=True)
        for positions in [torch.arange(piece.kv_len - piece.num_queries, piece.kv_len)]
    ]
    num_tokens = sum(piece.num_queries for piece in pieces)
    fused = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, generator=rng)
    # As a model hands them over: slices of one tensor, strided in all but the last dimension.
    q_tHD, k_tGD, v_tGD = (
        fused.to(dtype).to(device).split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    )
    stored = cache_dtype or dtype
    shape = (2, num_blocks, block_size, num_kv_heads, head_dim)
    k_NBGD, v_NBGD = torch.randn(shape, generator=rng)
    # What the new tokens overwrite is not a number until they do.
    for pages in (k_NBGD, v_NBGD):
        pages.view(-1, num_kv_heads, head_dim)[torch.cat(at)] = 1e4 if stored != FP8 else 400.0
    starts = np.concatenate([[0], np.cumsum([piece.num_queries for piece in pieces])])
    return Case(
        q_tHD,
        k_tGD,
        v_tGD,
        LayerCache(
            quantized(k_NBGD, stored, scales[0]).to(device),
            quantized(v_NBGD, stored, scales[1]).to(device),
            *scales,
        ),
        AttentionBatch(
            query_start_s1=torch.from_numpy(starts.astype(np.int32)).to(device),
            kv_len_s=torch.tensor([p.kv_len for p in pieces], dtype=torch.int32, device=device),
            block_ids_sb=block_ids_sb.to(device),
            slot_t=torch.cat(at).to(device),
            max_query_tokens=max(piece.num_queries for piece in pieces),
            max_kv_tokens=max(piece.kv_len for piece in pieces),
        ),
        tuple(pieces),
        tuple(tables),
        torch.device(device),
    )


def _attention(q_mHD: Tensor, k_nGD: Tensor, v_nGD: Tensor, rule: AttentionRule) -> Tensor:
    """Position by position and head by head."""
    out = torch.empty_like(q_mHD)
    num_queries, num_heads, _ = q_mHD.shape
    group = num_heads // k_nGD.shape[1]
    for m in range(num_queries):
        position = len(k_nGD) - num_queries + m
        first = 0 if rule.window is None else max(0, position - rule.window + 1)
        for h in range(num_heads):
            k_nD = k_nGD[first : position + 1, h // group]
            score_n = k_nD @ q_mHD[m, h] * rule.scale
            if rule.softcap is not None:
                score_n = rule.softcap * torch.tanh(score_n / rule.softcap)
            out[m, h] = score_n.softmax(0) @ v_nGD[first : position + 1, h // group]
    return out
