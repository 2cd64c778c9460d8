"""The native decoder of the Llama family: RMSNorm, rotary grouped-query attention, gated MLP.

Shape letters as in `worker.models.base`; N = H + G, the query and KV heads side by side.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from worker.models.base import Attend, ModelSpec
from worker.models.linear import Linear, RowParallel, VocabEmbedding, VocabHead
from worker.models.rope import Rope, Rotation


@dataclass(frozen=True, slots=True)
class Norm:
    weight_E: Tensor
    epsilon: float

    def __call__(self, x_tE: Tensor) -> Tensor:
        return F.rms_norm(x_tE, self.weight_E.shape, self.weight_E, self.epsilon)


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMSNorm over each head, of q and of k in one go."""

    weight_ND: Tensor
    epsilon: float

    def __call__(self, x_tND: Tensor) -> Tensor:
        return F.rms_norm(x_tND, x_tND.shape[-1:], None, self.epsilon) * self.weight_ND


@dataclass(frozen=True, slots=True)
class Attention:
    """q, k and v come from one matrix product, in this order of heads."""

    qkv: Linear
    output: RowParallel
    head_norm: HeadNorm | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotated: bool
    window: int | None

    def __call__(self, x_tE: Tensor, layer: int, rotation: Rotation, attend: Attend) -> Tensor:
        qkv_tND = self.qkv(x_tE).unflatten(-1, (-1, self.head_dim))
        qk_tND, v_tGD = qkv_tND.split(
            (self.num_heads + self.num_kv_heads, self.num_kv_heads), dim=1
        )
        if self.head_norm is not None:
            qk_tND = self.head_norm(qk_tND)
        if self.rotated:
            qk_tND = rotation(qk_tND)
        q_tHD, k_tGD = qk_tND.split((self.num_heads, self.num_kv_heads), dim=1)
        attended_tHD = attend(layer, q_tHD, k_tGD, v_tGD, window=self.window)
        return self.output(attended_tHD.flatten(1))


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """Gate and up projection come from one matrix product, gate first."""

    gate_up: Linear
    down: RowParallel

    def __call__(self, x_tE: Tensor) -> Tensor:
        gate_tF, up_tF = self.gate_up(x_tE).chunk(2, -1)
        return self.down(F.silu(gate_tF).mul_(up_tF))


@dataclass(frozen=True, slots=True)
class Layer:
    attention_norm: Norm
    attention: Attention
    mlp_norm: Norm
    mlp: GatedMlp

    def __call__(self, hidden_tE: Tensor, layer: int, rotation: Rotation, attend: Attend) -> Tensor:
        hidden_tE = hidden_tE + self.attention(
            self.attention_norm(hidden_tE), layer, rotation, attend
        )
        return hidden_tE + self.mlp(self.mlp_norm(hidden_tE))


class LlamaDecoder:
    """One shard; implements `worker.models.base.Decoder`."""

    def __init__(
        self,
        spec: ModelSpec,
        rope: Rope,
        layers: Sequence[Layer],
        embedding: VocabEmbedding | None,
        final_norm: Norm | None,
        head: VocabHead | None,
    ) -> None:
        """`embedding` belongs to the first stage, `final_norm` and `head` to the last."""
        self._spec = spec
        self._rope = rope
        self._layers = tuple(layers)
        self._embedding = embedding
        self._final_norm = final_norm
        self._head = head

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    def embed(self, token_ids_t: Tensor) -> Tensor:
        assert self._embedding is not None, "only the first stage embeds"
        return self._embedding(token_ids_t)

    def layers(self, hidden_tE: Tensor, position_ids_t: Tensor, attend: Attend) -> Tensor:
        rotation = self._rope(position_ids_t)
        for index, layer in enumerate(self._layers):
            hidden_tE = layer(hidden_tE, index, rotation, attend)
        return hidden_tE

    def logits(self, hidden_sE: Tensor) -> Tensor:
        assert self._final_norm is not None, "only the last stage has logits"
        assert self._head is not None
        return self._head(self._final_norm(hidden_sE))
