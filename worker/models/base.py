"""The seam between models and execution: what a decoder shard offers and what it is given.

Shape letters, here and in all of `worker/models`: t tokens of the flat batch (all sequences
of a plan, prefill chunks and decodes mixed), s rows whose logits are wanted, E hidden size,
H query heads and G KV heads of this rank, D head dimension, F MLP width of this rank,
V vocabulary.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape of one model shard: the layers of one pipeline stage, the heads of one rank."""

    architecture: str
    """As in `config.json`, e.g. "LlamaForCausalLM"."""
    dtype: torch.dtype
    """Of weights and activations; logits are always float32."""
    num_layers: int
    """Of this stage. Layers are numbered from 0 within a stage."""
    first_layer: int
    """Number of this stage's layer 0 in the whole model."""
    num_heads: int
    """Query heads of this rank."""
    num_kv_heads: int
    """KV heads of this rank; with more ranks than KV heads, each rank holds a copy of one."""
    head_dim: int
    hidden_size: int
    vocab_size: int
    """Of the logits, without the padding that tensor parallelism adds."""
    max_position: int
    """Positions 0 .. max_position - 1 are valid."""
    windows: tuple[int | None, ...]
    """Per layer of this stage; a window of w lets position i see positions i-w+1 .. i."""
    is_first_stage: bool
    is_last_stage: bool
    weight_bytes: int
    """Memory that the weights of this shard hold, packed copies included."""
    digest: str
    """The same on all ranks that read the same model, whatever their shard."""


class Attend(Protocol):
    """Causal attention over the paged cache, as the executor prepared it for one plan."""

    def __call__(
        self,
        layer: int,
        q_tHD: Tensor,
        k_tGD: Tensor,
        v_tGD: Tensor,
        *,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Write k and v of the new tokens of `layer` into the cache, then attend: [t, H, D].

        All writes of the batch happen before any read. Inputs may be non-contiguous in all
        but the last dimension. `scale` defaults to D ** -0.5. `window` is as in
        `ModelSpec.windows`. `softcap` c turns a score x into c * tanh(x / c).
        """
        ...


class Communicator(Protocol):
    """The tensor-parallel group of one stage, as a model sees it."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, the same bits on each; may reuse the memory of `x`."""
        ...

    def all_gather_last_dim(self, x: Tensor) -> Tensor:
        """The `x` of all ranks, in rank order, concatenated in the last dimension."""
        ...


class Solo:
    """The communicator of a group of one, or of a rank apart from its peers.

    Answers at once. What it gives has the shapes that the whole group would give, but in place of
    the peers' values there are none in a sum, and this rank's own where all are gathered.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather_last_dim(self, x: Tensor) -> Tensor:
        return x if self.size == 1 else torch.cat([x] * self.size, dim=-1)


class Decoder(Protocol):
    """One shard of a decoder-only model.

    A step is `embed` on the first stage, `layers` on every stage, `logits` on the last. All
    are called under `torch.inference_mode` and on every tensor-parallel rank alike.
    """

    @property
    def spec(self) -> ModelSpec: ...

    def embed(self, token_ids_t: Tensor) -> Tensor:
        """hidden_tE of int64 (or int32) ids; first stage only."""
        ...

    def layers(self, hidden_tE: Tensor, position_ids_t: Tensor, attend: Attend) -> Tensor:
        """hidden_tE after this stage's layers. Calls `attend` once per layer, in order."""
        ...

    def logits(self, hidden_sE: Tensor) -> Tensor:
        """float32 logits_sV of the given rows, the same on all ranks; last stage only.

        Includes the final norm, so it takes rows of what `layers` returned.
        """
        ...
