"""Paged causal attention in Triton: one kernel for prefill chunks, decodes and mixtures.

    program    some query tokens of one sequence x one KV head (x one span of its keys)
    row        one query head of one of these tokens: token row // GROUP, head row % GROUP
    tile       TILE keys: scores, running maximum and sum, weighted V (the online softmax)

Tiles of all sequences are numbered one after the other. Sequence i starts at tile
query_start[i] // TOKENS + i, which leaves room for its last, partly filled one; so a program
finds its sequence by bisection, and the host needs to know nothing but the sizes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.attention.base import AttentionBatch, AttentionRule, LayerCache
from worker.kv_cache import store

_SPAN = 512
"""Keys of one program of a decode; more of them are shared out, and put together after."""
_PREFILL_ROWS = 64
_FEWEST_ROWS = 16  # of a matrix product


class TritonAttention:
    """Works on NVIDIA and AMD GPUs; on CPU under Triton's interpreter, for tests."""

    name = "triton"

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
        num_tokens, num_heads, head_dim = q_tHD.shape
        _, block_size, num_kv_heads, _ = cache.k_NBGD.shape
        group = num_heads // num_kv_heads
        decode = batch.max_query_tokens == 1
        rows = triton.next_power_of_2(group if decode else max(group, _PREFILL_ROWS))
        rows = max(rows, _FEWEST_ROWS)
        tokens = 1 if decode else rows // group
        num_seqs = len(batch.kv_len_s)
        num_tiles = num_tokens // tokens + num_seqs
        num_spans = -(-batch.max_kv_tokens // _SPAN) if decode else 1
        out_tHD = torch.empty(
            (num_tokens, num_heads, head_dim), dtype=q_tHD.dtype, device=q_tHD.device
        )
        padded_dim = max(16, triton.next_power_of_2(head_dim))
        partial = q_tHD.new_empty(
            (num_spans, num_tokens if num_spans > 1 else 0, num_heads, padded_dim + 2),
            dtype=torch.float32,
        )
        _attend[(num_tiles, num_kv_heads, num_spans)](
            q_tHD,
            cache.k_NBGD,
            cache.v_NBGD,
            out_tHD,
            partial,
            batch.query_start_s1,
            batch.kv_len_s,
            batch.block_ids_sb,
            num_seqs,
            num_tokens,
            q_tHD.stride(0),
            q_tHD.stride(1),
            batch.block_ids_sb.stride(0),
            rule.scale * cache.k_scale,
            cache.v_scale,
            rule.softcap or 0.0,
            rule.window or 0,
            GROUP=group,
            KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            PADDED_DIM=padded_dim,
            BLOCK_SIZE=block_size,
            ROWS=rows,
            TOKENS=tokens,
            TILE=64 if head_dim <= 128 else 32,
            SPAN=_SPAN,
            SPLIT=num_spans > 1,
            EXACT=q_tHD.dtype == torch.float32,
        )
        if num_spans > 1:
            _combine[(num_tokens, num_heads)](
                partial,
                out_tHD,
                num_tokens,
                cache.v_scale,
                num_spans,
                HEADS=num_heads,
                HEAD_DIM=head_dim,
                PADDED_DIM=padded_dim,
                SPANS=triton.next_power_of_2(num_spans),
            )
        return out_tHD


@triton.jit
def _sequence_of(query_start, num_seqs, tile, TOKENS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The last sequence whose first tile is not beyond `tile`."""
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        first = tl.load(query_start + middle) // TOKENS + middle
        if first <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    q,
    k_pages,
    v_pages,
    out,
    partial,
    query_start,
    kv_len,
    block_ids,
    num_seqs,
    num_tokens,
    q_token_stride,
    q_head_stride,
    block_ids_stride,
    scale,
    value_scale,
    softcap,
    window,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    SPAN: tl.constexpr,
    SPLIT: tl.constexpr,
    EXACT: tl.constexpr,
):
    tile, kv_head, span = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    seq = _sequence_of(query_start, num_seqs, tile, TOKENS)
    begin = tl.load(query_start + seq)
    num_queries = tl.load(query_start + seq + 1) - begin
    first = (tile - (begin // TOKENS + seq)) * TOKENS
    if first >= num_queries:
        return
    keys = tl.load(kv_len + seq)

    row = tl.arange(0, ROWS)
    token = first + row // GROUP
    head = kv_head * GROUP + row % GROUP
    row_used = (row < TOKENS * GROUP) & (token < num_queries)
    position = keys - num_queries + token
    dim = tl.arange(0, PADDED_DIM)
    dim_used = dim < HEAD_DIM
    at = (begin + token).to(tl.int64)
    q_at = at[:, None] * q_token_stride + head[:, None] * q_head_stride + dim[None, :]
    q_rd = tl.load(q + q_at, mask=row_used[:, None] & dim_used[None, :], other=0.0)

    end = tl.minimum(keys, keys - num_queries + first + TOKENS)
    low = 0
    if window > 0:
        low = tl.maximum(0, keys - num_queries + first - window + 1)
    if SPLIT:
        low = tl.maximum(low, span * SPAN)
        end = tl.minimum(end, (span + 1) * SPAN)

    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    for start in range(low // TILE * TILE, end, TILE):
        key = start + tl.arange(0, TILE)
        key_used = (key >= low) & (key < end)
        block = tl.load(
            block_ids + seq * block_ids_stride + key // BLOCK_SIZE, mask=key_used, other=0
        )
        slot = block.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE
        kv_at = (slot * KV_HEADS + kv_head) * HEAD_DIM
        k_nd = tl.load(
            k_pages + kv_at[:, None] + dim[None, :],
            mask=key_used[:, None] & dim_used[None, :],
            other=0.0,
        ).to(q_rd.dtype)
        v_nd = tl.load(
            v_pages + kv_at[:, None] + dim[None, :],
            mask=key_used[:, None] & dim_used[None, :],
            other=0.0,
        ).to(q_rd.dtype)
        if EXACT:
            score = tl.dot(q_rd, tl.trans(k_nd), input_precision="ieee") * scale
        else:
            score = tl.dot(q_rd, tl.trans(k_nd)) * scale
        if softcap > 0:
            # tanh by exp of what is negative, which cannot overflow
            small = tl.exp(-2.0 * tl.abs(score / softcap))
            score = softcap * (1.0 - small) / (1.0 + small) * tl.where(score < 0, -1.0, 1.0)
        seen = key_used[None, :] & (key[None, :] <= position[:, None])
        if window > 0:
            seen = seen & (key[None, :] > position[:, None] - window)
        score = tl.where(seen, score, float("-inf"))
        new_best = tl.maximum(best, tl.max(score, 1))
        # A row that has seen nothing yet stays empty instead of becoming not a number.
        origin = tl.where(new_best == float("-inf"), 0.0, new_best)
        weight = tl.exp(score - origin[:, None])
        fade = tl.exp(best - origin)
        total = total * fade + tl.sum(weight, 1)
        acc = acc * fade[:, None]
        if EXACT:
            acc += tl.dot(weight, v_nd, input_precision="ieee")
        else:
            acc += tl.dot(weight.to(v_nd.dtype), v_nd)
        best = new_best

    where = at * (KV_HEADS * GROUP) + head
    if SPLIT:
        base = span.to(tl.int64) * num_tokens * (KV_HEADS * GROUP) + where
        base = base * (PADDED_DIM + 2)
        tl.store(partial + base, best, mask=row_used)
        tl.store(partial + base + 1, total, mask=row_used)
        tl.store(partial + base[:, None] + 2 + dim[None, :], acc, mask=row_used[:, None])
    else:
        result = acc * value_scale / total[:, None]
        tl.store(
            out + where[:, None] * HEAD_DIM + dim[None, :],
            result.to(out.dtype.element_ty),
            mask=row_used[:, None] & dim_used[None, :],
        )


@triton.jit
def _combine(  # type: ignore[no-untyped-def]
    partial,
    out,
    num_tokens,
    value_scale,
    num_spans,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    SPANS: tl.constexpr,
):
    """Put the spans of one query together; one that saw no key has a sum of 0."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    span = tl.arange(0, SPANS)
    used = span < num_spans
    base = ((span.to(tl.int64) * num_tokens + token) * HEADS + head) * (PADDED_DIM + 2)
    best = tl.load(partial + base, mask=used, other=float("-inf"))
    total = tl.load(partial + base + 1, mask=used, other=0.0)
    dim = tl.arange(0, PADDED_DIM)
    acc = tl.load(partial + base[:, None] + 2 + dim[None, :], mask=used[:, None], other=0.0)
    fade = tl.exp(best - tl.max(best, 0))
    result = tl.sum(acc * fade[:, None], 0) * value_scale / tl.sum(total * fade, 0)
    at = (token * HEADS + head) * HEAD_DIM + dim
    tl.store(out + at, result.to(out.dtype.element_ty), mask=dim < HEAD_DIM)
