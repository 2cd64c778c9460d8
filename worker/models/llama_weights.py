"""Reading one rank's shard of a Llama-like checkpoint into fused, parallel layers."""

import logging
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from configs.ranks import kv_head_copies, layers_of_stage
from worker.models.base import Communicator, ModelSpec
from worker.models.checkpoint import Checkpoint, digest
from worker.models.config import DecoderConfig
from worker.models.linear import (
    NormedLinear,
    ResidualLinear,
    VocabEmbedding,
    VocabHead,
    copies_weight,
    make_normed_linear,
    make_residual_linear,
)
from worker.models.llama import Attention, GatedMlp, Layer, LlamaDecoder
from worker.models.norms import HeadNorm, Norm
from worker.models.rope import Rope
from worker.models.shape import shape_of
from worker.models.sharding import TensorSlice, tensor_slice

_log = logging.getLogger(__name__)


class _Weighted(Protocol):
    @property
    def weight_bytes(self) -> int: ...


_W = TypeVar("_W", bound=_Weighted)


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of one stored projection that go into a fused matrix."""

    projection: str
    total: int
    taken: range


def load_llama(
    checkpoint: Checkpoint,
    config: DecoderConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    comm: Communicator,
    stage: int,
    num_stages: int,
) -> LlamaDecoder:
    """The shard of tensor rank `comm.rank` in `stage`; reads nothing else from the files.

    Each tensor is copied once, into its place; a packed linear frees its source before the
    next is read. Raises ModelError, or ConfigError where the ranks do not divide the model.
    """
    part = tensor_slice(
        shape_of(config), config.vocab_size, rank=comm.rank, size=comm.size, num_stages=num_stages
    )
    copies = kv_head_copies(config.num_kv_heads, comm.size)
    if copies > 1 and comm.rank == 0:
        _log.warning(
            "%d tensor-parallel ranks share %d KV heads: each is held by %d ranks, so the KV cache "
            "takes %d times the memory that it needs",
            comm.size,
            config.num_kv_heads,
            copies,
            copies,
        )
    layers = layers_of_stage(config.num_layers, num_stages, stage)
    return _Loader(checkpoint, config, part, layers, dtype, device, comm).load()


@dataclass
class _Loader:
    checkpoint: Checkpoint
    config: DecoderConfig
    part: TensorSlice
    layer_numbers: range
    dtype: torch.dtype
    device: torch.device
    comm: Communicator

    weight_bytes = 0

    def __post_init__(self) -> None:
        self._buffer = self._empty(0)

    def load(self) -> LlamaDecoder:
        config, part = self.config, self.part
        is_first = self.layer_numbers.start == 0
        is_last = self.layer_numbers.stop == config.num_layers
        embedding = self._embedding() if is_first else None
        layers = [self._layer(number) for number in self.layer_numbers]
        head = self._head(embedding) if is_last else None
        spec = ModelSpec(
            architecture=config.architecture,
            dtype=self.dtype,
            num_layers=len(layers),
            first_layer=self.layer_numbers.start,
            num_heads=len(part.heads),
            num_kv_heads=len(part.kv_heads),
            head_dim=config.head_dim,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            max_position=config.max_position,
            windows=config.windows[self.layer_numbers.start : self.layer_numbers.stop],
            is_first_stage=is_first,
            is_last_stage=is_last,
            weight_bytes=self.weight_bytes,
            digest=digest(self.checkpoint.directory),
        )
        rope = Rope(config.rope, config.head_dim, self.dtype, self.device)
        return LlamaDecoder(spec, rope, layers, embedding, head)

    def _layer(self, number: int) -> Layer:
        config, part = self.config, self.part
        name = f"model.layers.{number}"
        head_dim, width = config.head_dim, config.intermediate_size
        attention = Attention(
            qkv=self._normed_linear(
                self._norm(f"{name}.input_layernorm"),
                f"{name}.self_attn",
                _Rows("q_proj", config.num_heads * head_dim, _scaled(part.heads, head_dim)),
                _Rows("k_proj", config.num_kv_heads * head_dim, _scaled(part.kv_heads, head_dim)),
                _Rows("v_proj", config.num_kv_heads * head_dim, _scaled(part.kv_heads, head_dim)),
                bias=config.qkv_bias,
            ),
            output=self._residual_linear(
                f"{name}.self_attn.o_proj",
                config.num_heads * head_dim,
                _scaled(part.heads, head_dim),
                bias=config.output_bias,
            ),
            head_norm=self._head_norm(f"{name}.self_attn") if config.qk_norm else None,
            num_heads=len(part.heads),
            num_kv_heads=len(part.kv_heads),
            head_dim=head_dim,
            rotated=config.rotated[number],
            window=config.windows[number],
        )
        mlp = GatedMlp(
            gate_up=self._normed_linear(
                self._norm(f"{name}.post_attention_layernorm"),
                f"{name}.mlp",
                _Rows("gate_proj", width, part.mlp),
                _Rows("up_proj", width, part.mlp),
                bias=config.mlp_bias,
                gated=True,
            ),
            down=self._residual_linear(
                f"{name}.mlp.down_proj", width, part.mlp, bias=config.mlp_bias
            ),
        )
        return Layer(attention, mlp)

    def _normed_linear(
        self, norm: Norm, name: str, *parts: _Rows, bias: bool, gated: bool = False
    ) -> NormedLinear:
        """One matrix of the given rows of several projections, one below the other."""
        width = self.config.hidden_size
        height = sum(len(rows.taken) for rows in parts)
        weight_OE = self._matrix(height, width)
        bias_O = self._empty(height) if bias else None
        start = 0
        for rows in parts:
            place = slice(start, start + len(rows.taken))
            where = (_as_slice(rows.taken),)
            projection = f"{name}.{rows.projection}"
            self._fill(weight_OE[place], f"{projection}.weight", (rows.total, width), where)
            if bias_O is not None:
                self._fill(bias_O[place], f"{projection}.bias", (rows.total,), where)
            start = place.stop
        return self._count(make_normed_linear(norm, weight_OE, bias_O, gated=gated))

    def _residual_linear(
        self, name: str, total: int, columns: range, *, bias: bool
    ) -> ResidualLinear:
        height = self.config.hidden_size
        weight_OI = self._matrix(height, len(columns))
        where = (slice(None), _as_slice(columns))
        self._fill(weight_OI, f"{name}.weight", (height, total), where)
        bias_O = None
        if bias and self.comm.rank == 0:
            bias_O = self._empty(height)
            self._fill(bias_O, f"{name}.bias", (height,))
        return self._count(make_residual_linear(weight_OI, bias_O, self.comm))

    def _embedding(self) -> VocabEmbedding:
        weight_VE = self._vocab_rows("model.embed_tokens.weight")
        return self._count(VocabEmbedding(weight_VE, self.part.vocab.start, self.comm))

    def _head(self, embedding: VocabEmbedding | None) -> VocabHead:
        """A tied head shares the embedding's memory unless its linear keeps a copy."""
        norm = self._norm("model.norm")
        tied = self.config.tied_embeddings
        if tied and embedding is not None:
            linear = make_normed_linear(norm, embedding.weight_VE)
            shared_bytes = embedding.weight_bytes if linear.shares_weight else 0
            self.weight_bytes += linear.weight_bytes - shared_bytes
        else:
            name = "model.embed_tokens.weight" if tied else "lm_head.weight"
            linear = self._count(make_normed_linear(norm, self._vocab_rows(name)))
        return VocabHead(linear, self.config.vocab_size, self.comm)

    def _vocab_rows(self, name: str) -> Tensor:
        """This rank's rows; those beyond the vocabulary are zero."""
        vocab, part = self.config.vocab_size, self.part.vocab
        weight_VE = self._empty(len(part), self.config.hidden_size).zero_()
        held = slice(min(part.start, vocab), min(part.stop, vocab))
        place = weight_VE[: held.stop - held.start]
        self._fill(place, name, (vocab, self.config.hidden_size), (held,))
        return weight_VE

    def _norm(self, name: str) -> Norm:
        weight_E = self._empty(self.config.hidden_size)
        self._fill(weight_E, f"{name}.weight", (self.config.hidden_size,))
        return Norm(weight_E, self.config.rms_norm_eps)

    def _head_norm(self, name: str) -> HeadNorm:
        head_dim, num_heads = self.config.head_dim, len(self.part.heads)
        weight_ND = self._empty(num_heads + len(self.part.kv_heads), head_dim).float()
        self._fill(weight_ND[:num_heads], f"{name}.q_norm.weight", (head_dim,))
        self._fill(weight_ND[num_heads:], f"{name}.k_norm.weight", (head_dim,))
        self.weight_bytes += weight_ND.nbytes
        return HeadNorm(weight_ND, self.config.rms_norm_eps)

    def _matrix(self, height: int, width: int) -> Tensor:
        """Where the next matrix is read to, until its linear has been made.

        One buffer for all that are copied then: freed between the copies, they would leave holes
        in memory that hold a quarter as much as the weights.
        """
        if not copies_weight(self._empty(0, width)):
            return self._empty(height, width)
        if self._buffer.numel() < height * width:
            self._buffer = self._empty(height * width)
        return self._buffer[: height * width].view(height, width)

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(*shape, dtype=self.dtype, device=self.device)

    def _fill(
        self, place: Tensor, name: str, shape: tuple[int, ...], where: tuple[slice, ...] = ()
    ) -> None:
        """Copy the part `where` of a stored tensor of `shape` to `place`, converting the dtype."""
        place.copy_(self.checkpoint.read(name, shape, where))

    def _count(self, weighted: _W) -> _W:
        self.weight_bytes += weighted.weight_bytes
        return weighted


def _as_slice(part: range) -> slice:
    return slice(part.start, part.stop)


def _scaled(part: range, factor: int) -> range:
    """The rows of a run of heads, `factor` rows each."""
    return range(part.start * factor, part.stop * factor)
