"""The native decoder of the Llama family: RMSNorm, rotary grouped-query attention, gated MLP.

Shape letters as in `worker.models.base`; N = H + G, the query and KV heads side by side.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from worker.models.base import Attend, ModelSpec
from worker.models.linear import NormedLinear, ResidualLinear, VocabEmbedding, VocabHead
from worker.models.norms import HeadNorm
from worker.models.rope import Rope, Rotation


@dataclass(frozen=True, slots=True)
class Attention:
    """q, k and v come from one matrix product, in this order of heads."""

    qkv: NormedLinear
    output: ResidualLinear
    head_norm: HeadNorm | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotated: bool
    window: int | None

    def __call__(self, hidden_tE: Tensor, layer: int, rotation: Rotation, attend: Attend) -> Tensor:
        qkv_tND = self.qkv(hidden_tE).view(len(hidden_tE), -1, self.head_dim)
        qk_tND, v_tGD = qkv_tND.split(
            (self.num_heads + self.num_kv_heads, self.num_kv_heads), dim=1
        )
        if self.rotated:
            qk_tND = rotation(qk_tND, self.head_norm)
        elif self.head_norm is not None:
            qk_tND = self.head_norm(qk_tND)
        q_tHD, k_tGD = qk_tND.split((self.num_heads, self.num_kv_heads), dim=1)
        attended_tHD = attend(layer, q_tHD, k_tGD, v_tGD, window=self.window)
        return self.output(attended_tHD.flatten(1), hidden_tE)


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """Gate and up projection come from one matrix product, gate first."""

    gate_up: NormedLinear
    down: ResidualLinear

    def __call__(self, hidden_tE: Tensor) -> Tensor:
        return self.down(self.gate_up(hidden_tE), hidden_tE)


@dataclass(frozen=True, slots=True)
class Layer:
    attention: Attention
    mlp: GatedMlp


class LlamaDecoder:
    """One shard; implements `worker.models.base.Decoder`."""

    def __init__(
        self,
        spec: ModelSpec,
        rope: Rope,
        layers: Sequence[Layer],
        embedding: VocabEmbedding | None,
        head: VocabHead | None,
    ) -> None:
        """`embedding` belongs to the first stage, `head` to the last."""
        self._spec = spec
        self._rope = rope
        self._layers = tuple(layers)
        self._embedding = embedding
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
            hidden_tE = layer.attention(hidden_tE, index, rotation, attend)
            hidden_tE = layer.mlp(hidden_tE)
        return hidden_tE

    def logits(self, hidden_sE: Tensor) -> Tensor:
        assert self._head is not None, "only the last stage has logits"
        return self._head(hidden_sE)
