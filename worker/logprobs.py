"""Log probabilities with ranks, of sampled tokens and of prompt tokens.

They rate the model's own distribution: before penalties, biases, masks and temperature.
"""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from scheduler.messages import PromptLogprobs, TokenLogprobs
from worker.batch import FlatBatch
from worker.sampling_table import SamplingTable
from worker.sequence_table import Int64s, SequenceTable

_SLICE_BYTES = 64 << 20
"""Logits held at once while rating a prompt."""


def token_logprobs(logits_nV: Tensor, token_id_n: Tensor, num_top_n: Int64s) -> list[TokenLogprobs]:
    """Rate each row's token, and report as many of the likeliest as the row asks for."""
    norm_n1 = logits_nV.logsumexp(dim=-1, keepdim=True)
    chosen_n1 = logits_nV.gather(1, token_id_n[:, None])
    rank_n = (logits_nV > chosen_n1).sum(dim=-1) + 1
    logprob_n = (chosen_n1 - norm_n1)[:, 0]
    most = min(int(num_top_n.max()), logits_nV.shape[1])
    top_nl, top_id_nl = logits_nV.topk(most, dim=-1)
    columns = (logprob_n, rank_n, top_nl - norm_n1, top_id_nl)
    return [
        TokenLogprobs(logprob, rank, tuple(zip(top_ids[:num], tops[:num], strict=True)))
        for logprob, rank, tops, top_ids, num in zip(
            *(column.tolist() for column in columns), num_top_n.tolist(), strict=True
        )
    ]


def prompt_logprobs(
    batch: FlatBatch,
    hidden_tE: Tensor,
    logits: Callable[[Tensor], Tensor],
    sampling: SamplingTable,
    table: SequenceTable,
) -> dict[int, PromptLogprobs]:
    """Rows for the prompt tokens that the plan's hidden states predict, by piece.

    Calls `logits`, a collective, equally often on all tensor-parallel ranks.

        piece            positions [start, start + n)
        predicts         positions [start + 1, start + n + 1), the last one is sampled
        rated here       those of them below num_prompt_tokens
    """
    work = batch.work
    num_top_s = sampling.settings(work.row_s)["prompt_logprobs"]
    end_s = np.minimum(work.start_s + work.num_tokens_s + 1, table.num_prompt_tokens[work.row_s])
    count_s = np.where(num_top_s >= 0, end_s - work.start_s - 1, 0).clip(0)
    pieces = np.flatnonzero(count_s)
    if not len(pieces):
        return {}
    count_p = count_s[pieces]
    piece_r = np.repeat(pieces, count_p)
    offset_r = np.arange(len(piece_r)) - np.repeat(np.cumsum(count_p) - count_p, count_p)
    token_id_r = table.token_ids[work.row_s[piece_r], work.start_s[piece_r] + offset_r + 1]
    rated = _rated(
        hidden_tE,
        batch.query_start_s1[piece_r] + offset_r,
        token_id_r.astype(np.int64),
        num_top_s[piece_r],
        logits,
        table.vocab_size,
    )
    return {
        int(piece): PromptLogprobs(
            int(work.start_s[piece]) + 1, tuple(next(rated) for _ in range(count))
        )
        for piece, count in zip(pieces, count_p.tolist(), strict=True)
    }


def _rated(
    hidden_tE: Tensor,
    hidden_r: Int64s,
    token_id_r: Int64s,
    num_top_r: Int64s,
    logits: Callable[[Tensor], Tensor],
    vocab_size: int,
) -> Iterator[TokenLogprobs]:
    """In slices: the logits of a whole prompt of 8,192 tokens would take 1.6 GB."""
    length = max(1, _SLICE_BYTES // (4 * vocab_size))
    for begin in range(0, len(hidden_r), length):
        part = slice(begin, begin + length)
        at = torch.from_numpy(hidden_r[part]).to(hidden_tE.device)
        logits_rV = logits(hidden_tE[at])
        token_ids = torch.from_numpy(token_id_r[part]).to(hidden_tE.device)
        yield from token_logprobs(logits_rV, token_ids, num_top_r[part])
