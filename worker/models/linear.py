"""The linear layers of a decoder, with what surrounds them, in the form that suits the device.

Each layer reads its input through `NormedLinear` (norm, product, perhaps a gate) and writes it
back through `ResidualLinear` (product, sum over ranks, residual), so that a kernel may do the
whole of one. Shape letters: t rows, E hidden size, I input width, O output width,
F width of the gated MLP.
"""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.models.base import Communicator
from worker.models.cpu_kernels import (
    PackedLinear,
    RowNorm,
    gate_rows,
    has_kernel,
    has_matrix_units,
)
from worker.models.norms import Norm


class Linear(Protocol):
    """y = x W^T + bias."""

    @property
    def weight_bytes(self) -> int: ...

    @property
    def shares_weight(self) -> bool:
        """Whether it computes from the tensor it was made from, and holds no copy."""
        ...

    def __call__(self, x_tI: Tensor, /) -> Tensor: ...


class NormedLinear(Protocol):
    """y = f(norm(x) W^T + bias), where f is nothing or silu(gate) * up."""

    @property
    def weight_bytes(self) -> int: ...

    @property
    def shares_weight(self) -> bool: ...

    def __call__(self, x_tE: Tensor, /) -> Tensor: ...


class ResidualLinear(Protocol):
    """y = residual + the sum over ranks of x W^T + bias."""

    @property
    def weight_bytes(self) -> int: ...

    def __call__(self, x_tI: Tensor, residual_tE: Tensor, /) -> Tensor: ...


class PlainLinear:
    """What torch does by itself; shares the memory of `weight_OI`."""

    shares_weight = True

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> None:
        self._weight_OI = weight_OI
        self._bias_O = bias_O
        self.weight_bytes = _bytes(weight_OI, bias_O)

    def __call__(self, x_tI: Tensor) -> Tensor:
        return F.linear(x_tI, self._weight_OI, self._bias_O)


class ReorderedLinear:
    """Weights reordered once for oneDNN's kernels, which `F.linear` would do on every call.

    Holds a copy; the caller drops `weight_OI`.
    """

    shares_weight = False

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> None:
        self._reordered = torch.ops.mkldnn._reorder_linear_weight(weight_OI, None)
        self._bias_O = bias_O
        self.weight_bytes = _bytes(weight_OI, bias_O)

    def __call__(self, x_tI: Tensor) -> Tensor:
        y_tO: Tensor = torch.ops.mkldnn._linear_pointwise(
            x_tI, self._reordered, self._bias_O, "none", [], ""
        )
        return y_tO


class WideningLinear:
    """Half-precision weights on a CPU without half-precision matrix instructions.

    torch multiplies row by row there (SmolLM2: 15 ms of linears per row, 6.4 s for 512).
    Past two rows it is cheaper to widen a tile of weights to float32, which stays in the
    cache, and to multiply in float32. Shares the memory of `weight_OI`.
    """

    shares_weight = True
    _ROWS_AS_VECTORS = 2
    _TILE_ELEMENTS = 1 << 20

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> None:
        self._weight_OI = weight_OI
        self._bias_O = bias_O
        self._tile_rows = max(1, self._TILE_ELEMENTS // weight_OI.shape[1])
        self.weight_bytes = _bytes(weight_OI, bias_O)

    def __call__(self, x_tI: Tensor) -> Tensor:
        if x_tI.shape[0] <= self._ROWS_AS_VECTORS:
            return F.linear(x_tI, self._weight_OI, self._bias_O)
        wide_tI = x_tI.float()
        tiles = [F.linear(wide_tI, tile.float()) for tile in self._weight_OI.split(self._tile_rows)]
        y_tO = tiles[0] if len(tiles) == 1 else torch.cat(tiles, -1)
        if self._bias_O is not None:
            y_tO += self._bias_O
        return y_tO.to(x_tI.dtype)


class SeparateNormedLinear:
    """Norm, product and gate one after the other."""

    def __init__(
        self, norm: Norm | RowNorm, linear: Linear, gate: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self._norm = norm
        self._linear = linear
        self._gate = gate
        self.shares_weight = linear.shares_weight
        self.weight_bytes = norm.weight_E.nbytes + linear.weight_bytes

    def __call__(self, x_tE: Tensor) -> Tensor:
        y_tO = self._linear(self._norm(x_tE))
        return y_tO if self._gate is None else self._gate(y_tO)


def plain_gate(x_tO: Tensor) -> Tensor:
    """silu(gate) * up by torch, where a row is gate and up side by side: O = 2 F."""
    gate_tF, up_tF = x_tO.chunk(2, -1)
    return F.silu(gate_tF).mul_(up_tF)


class SummedResidualLinear:
    """Input columns are spread over ranks: partial products, their sum, then the residual.

    A bias belongs to the linear of rank 0 alone, or it would be added once per rank.
    """

    def __init__(self, linear: Linear, comm: Communicator) -> None:
        self._linear = linear
        self._comm = comm
        self.weight_bytes = linear.weight_bytes

    def __call__(self, x_tI: Tensor, residual_tE: Tensor) -> Tensor:
        return residual_tE + self._comm.all_reduce(self._linear(x_tI))


def copies_weight(weight: Tensor) -> bool:
    """Whether the linear made from `weight` keeps a copy of its own and not `weight` itself."""
    return _packs(weight) or _reorders(weight)


def make_linear(weight_OI: Tensor, bias_O: Tensor | None = None) -> Linear:
    """The fastest linear for the device and dtype of `weight_OI`."""
    if _packs(weight_OI):
        return PackedLinear(weight_OI, bias_O)
    if _reorders(weight_OI):
        return ReorderedLinear(weight_OI, bias_O)
    if weight_OI.device.type == "cpu" and weight_OI.dtype != torch.float32:
        return WideningLinear(weight_OI, bias_O)
    return PlainLinear(weight_OI, bias_O)


def make_normed_linear(
    norm: Norm, weight_OE: Tensor, bias_O: Tensor | None = None, *, gated: bool = False
) -> NormedLinear:
    """With `gated`, the first half of the rows of W gives the gate, the second what it gates."""
    if _packs(weight_OE):
        return PackedLinear(
            weight_OE, bias_O, norm_weight_I=norm.weight_E, epsilon=norm.epsilon, gated=gated
        )
    linear = make_linear(weight_OE, bias_O)
    if weight_OE.device.type == "cpu" and has_kernel("rows"):
        row_norm = RowNorm(norm.weight_E, norm.epsilon)
        return SeparateNormedLinear(row_norm, linear, gate_rows if gated else None)
    return SeparateNormedLinear(norm, linear, plain_gate if gated else None)


def make_residual_linear(
    weight_OI: Tensor, bias_O: Tensor | None, comm: Communicator
) -> ResidualLinear:
    if comm.size == 1 and _packs(weight_OI):
        return PackedLinear(weight_OI, bias_O)
    return SummedResidualLinear(make_linear(weight_OI, bias_O), comm)


def _packs(weight: Tensor) -> bool:
    """Whether our own kernel is the fastest for `weight`: CPUs, but for what oneDNN does."""
    if weight.device.type != "cpu" or not has_kernel("linear"):
        return False
    return has_matrix_units(weight.dtype) or not _has_instructions(weight.dtype)


def _reorders(weight: Tensor) -> bool:
    """Whether oneDNN is left with `weight`, and the CPU has instructions for its dtype."""
    is_left = weight.device.type == "cpu" and not _packs(weight)
    return is_left and _has_instructions(weight.dtype)


def _has_instructions(dtype: torch.dtype) -> bool:
    """Whether oneDNN knows instructions of this CPU for `dtype`, half a float32 wide."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return False


class VocabEmbedding:
    """Token embeddings whose rows are spread over ranks: `first_id` .. `first_id` + rows - 1."""

    def __init__(self, weight_VE: Tensor, first_id: int, comm: Communicator) -> None:
        self.weight_VE = weight_VE
        self._first_id = first_id
        self._comm = comm
        self.weight_bytes = weight_VE.nbytes

    def __call__(self, token_ids_t: Tensor) -> Tensor:
        if self._comm.size == 1:
            return F.embedding(token_ids_t, self.weight_VE)
        rows_t = token_ids_t - self._first_id
        held_t = (rows_t >= 0) & (rows_t < self.weight_VE.shape[0])
        partial_tE = F.embedding(rows_t.where(held_t, 0), self.weight_VE)
        return self._comm.all_reduce(partial_tE * held_t[:, None])


class VocabHead:
    """Final norm and output projection, whose rows are spread over ranks."""

    def __init__(self, linear: NormedLinear, vocab_size: int, comm: Communicator) -> None:
        self._linear = linear
        self._vocab_size = vocab_size
        self._comm = comm

    def __call__(self, hidden_sE: Tensor) -> Tensor:
        """float32 logits of all ids."""
        logits_sV = self._comm.all_gather_last_dim(self._linear(hidden_sE))
        return logits_sV[:, : self._vocab_size].float()


def _bytes(weight: Tensor, bias: Tensor | None) -> int:
    return weight.nbytes + (0 if bias is None else bias.nbytes)
