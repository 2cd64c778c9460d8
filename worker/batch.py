"""From the work of a plan to the flat batch a model runs over, by index arithmetic alone.

    piece i of the plan      positions [start, start + n) of row r
    flat batch               [ piece 0 | piece 1 | ... ]     t tokens, s pieces
    token of position p      token_ids[r, p]
    its slot                 block_ids[r, p // B] * B + p % B

No loop over tokens or blocks: 8,192 tokens cost what one does, a few vector operations.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker.attention.base import AttentionBatch
from worker.sequence_table import Int64s, SequenceTable, Work


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """All tokens of one plan. Its tensors are copies: later changes of the table do not show."""

    work: Work
    token_ids_t: Tensor
    """int64, on the device."""
    position_ids_t: Tensor
    """int64, on the device."""
    attention: AttentionBatch
    query_start_s1: Int64s
    """Piece i is [query_start[i], query_start[i + 1]) of the flat batch."""
    sampled_k: Int64s
    """Which pieces are sampled, as indices into the s pieces."""

    @property
    def num_tokens(self) -> int:
        return int(self.query_start_s1[-1])

    @property
    def last_token_k(self) -> Int64s:
        """Index in the flat batch of the last token of each sampled piece."""
        return self.query_start_s1[self.sampled_k + 1] - 1


def flat_batch(
    work: Work, table: SequenceTable, *, block_size: int, device: torch.device
) -> FlatBatch:
    """The flat batch of `work`, which must not be empty, over the table as it is now."""
    query_start_s1 = np.zeros(len(work.row_s) + 1, np.int64)
    np.cumsum(work.num_tokens_s, out=query_start_s1[1:])
    num_tokens = int(query_start_s1[-1])
    row_t = np.repeat(work.row_s, work.num_tokens_s)
    position_t = np.arange(num_tokens) + np.repeat(
        work.start_s - query_start_s1[:-1], work.num_tokens_s
    )
    block_t, slot_t = np.divmod(position_t, block_size)
    slot_t += table.block_ids[row_t, block_t].astype(np.int64) * block_size
    kv_len_s = work.start_s + work.num_tokens_s
    max_kv_tokens = int(kv_len_s.max())
    block_ids_sb = table.block_ids[work.row_s, : -(-max_kv_tokens // block_size)]
    return FlatBatch(
        work=work,
        token_ids_t=_on(device, table.token_ids[row_t, position_t].astype(np.int64)),
        position_ids_t=_on(device, position_t),
        attention=AttentionBatch(
            query_start_s1=_on(device, query_start_s1.astype(np.int32)),
            kv_len_s=_on(device, kv_len_s.astype(np.int32)),
            block_ids_sb=_on(device, block_ids_sb),
            slot_t=_on(device, slot_t),
            max_query_tokens=int(work.num_tokens_s.max()),
            max_kv_tokens=max_kv_tokens,
        ),
        query_start_s1=query_start_s1,
        sampled_k=np.flatnonzero(work.sample_s),
    )


def _on(device: torch.device, array: np.ndarray) -> Tensor:
    """`array` as a tensor on `device`, without a copy where that is the CPU."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
