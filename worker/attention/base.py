"""What an attention backend is given and must do.

Shape letters, here and in all of `worker/attention`: t tokens of the flat batch, s sequences
in it, b blocks of a table, H query heads and G KV heads of this rank, D head dimension,
N blocks of the pool, B block size.

    flat batch   [ sequence 0 | sequence 1 | ... ]      query_start_s1 cuts it
    sequence i   its last `query_start[i+1] - query_start[i]` known positions are queries,
                 positions 0 .. kv_len[i]-1 are keys; position p lies in slot p % B of
                 block block_ids[i, p // B]
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Where the sequences of one plan lie in the cache; the same for every layer."""

    query_start_s1: Tensor
    """int32 [s + 1]."""
    kv_len_s: Tensor
    """int32; counts the tokens of this plan."""
    block_ids_sb: Tensor
    """int32; entries beyond a sequence's blocks are any valid ids."""
    slot_t: Tensor
    """int64; where the K and V of each new token go, counted in slots of the whole pool."""
    max_query_tokens: int
    max_kv_tokens: int


@dataclass(frozen=True, slots=True)
class LayerCache:
    """K and V of one layer. A stored x stands for x * scale."""

    k_NBGD: Tensor
    v_NBGD: Tensor
    k_scale: float
    v_scale: float

    @property
    def block_size(self) -> int:
        return int(self.k_NBGD.shape[1])


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """What a layer's attention computes: softmax(cap(q . k * scale)) . v over what it may see."""

    scale: float
    """Positive."""
    window: int | None = None
    """Position i sees i - window + 1 .. i; None: 0 .. i."""
    softcap: float | None = None
    """c turns a score x into c * tanh(x / c)."""


class AttentionBackend(Protocol):
    """Attention over the paged cache. One instance serves all layers of a rank."""

    @property
    def name(self) -> str: ...

    def attend(
        self,
        q_tHD: Tensor,
        k_tGD: Tensor,
        v_tGD: Tensor,
        cache: LayerCache,
        batch: AttentionBatch,
        rule: AttentionRule,
    ) -> Tensor:
        """Store all of k and v in `cache`, then attend: a new [t, H, D] of q's dtype.

        Every store happens before any read, because a sequence of the batch may read blocks
        that another one fills in the same plan. Inputs may be strided in all but the last
        dimension; they are not changed. Accumulates in float32. The result for a sequence
        does not depend on the others in the batch: on CPU to the last bit, on GPU to rounding.
        """
        ...
