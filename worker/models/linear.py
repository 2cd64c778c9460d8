"""Linear layers in the form that is fastest on the device: y = x W^T + b.

Shape letters: t rows, I input width, O output width.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.models.base import Communicator


class Linear(Protocol):
    @property
    def weight_bytes(self) -> int: ...

    @property
    def shares_weight(self) -> bool:
        """Whether it computes from the tensor it was made from, and holds no copy."""
        ...

    def __call__(self, x_tI: Tensor) -> Tensor: ...


class PlainLinear:
    """What torch does by itself; shares the memory of `weight_OI`."""

    shares_weight = True

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> None:
        self._weight_OI = weight_OI
        self._bias_O = bias_O

    @property
    def weight_bytes(self) -> int:
        return _bytes(self._weight_OI, self._bias_O)

    def __call__(self, x_tI: Tensor) -> Tensor:
        return F.linear(x_tI, self._weight_OI, self._bias_O)


class PackedLinear:
    """Weights reordered once for oneDNN's kernels, which `F.linear` would do on every call.

    Holds a copy; the caller drops `weight_OI`. Only where `can_pack` says so.
    """

    shares_weight = False

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI, None)
        self._bias_O = bias_O
        self._weight_bytes = _bytes(weight_OI, bias_O)

    @property
    def weight_bytes(self) -> int:
        return self._weight_bytes

    def __call__(self, x_tI: Tensor) -> Tensor:
        y_tO = torch.ops.mkldnn._linear_pointwise(x_tI, self._packed, self._bias_O, "none", [], "")
        assert isinstance(y_tO, Tensor)
        return y_tO


_GEMV_ROWS = 2
_TILE_ELEMENTS = 1 << 20


class WideningLinear:
    """Half-precision weights on a CPU without half-precision matrix instructions.

    torch multiplies row by row there (SmolLM2: 15 ms of linears per row, 6.4 s for 512).
    Past two rows it is cheaper to widen a tile of weights to float32, which stays in the
    cache, and to multiply in float32. Shares the memory of `weight_OI`.
    """

    shares_weight = True

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> None:
        self._weight_OI = weight_OI
        self._bias_O = bias_O
        self._tile_rows = max(1, _TILE_ELEMENTS // weight_OI.shape[1])

    @property
    def weight_bytes(self) -> int:
        return _bytes(self._weight_OI, self._bias_O)

    def __call__(self, x_tI: Tensor) -> Tensor:
        if x_tI.shape[0] <= _GEMV_ROWS:
            return F.linear(x_tI, self._weight_OI, self._bias_O)
        wide_tI = x_tI.float()
        tiles = [F.linear(wide_tI, tile.float()) for tile in self._weight_OI.split(self._tile_rows)]
        y_tO = tiles[0] if len(tiles) == 1 else torch.cat(tiles, -1)
        if self._bias_O is not None:
            y_tO += self._bias_O
        return y_tO.to(x_tI.dtype)


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies `dtype` with oneDNN, by its own instructions."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return False


def make_linear(weight_OI: Tensor, bias_O: Tensor | None = None) -> Linear:
    """The fastest linear for the device and dtype of `weight_OI`."""
    if weight_OI.device.type != "cpu" or weight_OI.dtype == torch.float32:
        return PlainLinear(weight_OI, bias_O)
    if can_pack(weight_OI.dtype):
        return PackedLinear(weight_OI, bias_O)
    return WideningLinear(weight_OI, bias_O)


class RowParallel:
    """A linear whose input columns are spread over ranks: partial products, then their sum.

    A bias belongs to the linear of rank 0 alone, or it would be added once per rank.
    """

    def __init__(self, linear: Linear, comm: Communicator) -> None:
        self._linear = linear
        self._comm = comm

    @property
    def weight_bytes(self) -> int:
        return self._linear.weight_bytes

    def __call__(self, x_tI: Tensor) -> Tensor:
        return self._comm.all_reduce(self._linear(x_tI))


class VocabEmbedding:
    """Token embeddings whose rows are spread over ranks: `first_id` .. `first_id` + rows - 1."""

    def __init__(self, weight_VE: Tensor, first_id: int, comm: Communicator) -> None:
        self.weight_VE = weight_VE
        self._first_id = first_id
        self._comm = comm

    @property
    def weight_bytes(self) -> int:
        return self.weight_VE.nbytes

    def __call__(self, token_ids_t: Tensor) -> Tensor:
        if self._comm.size == 1:
            return F.embedding(token_ids_t, self.weight_VE)
        rows_t = token_ids_t - self._first_id
        held_t = (rows_t >= 0) & (rows_t < self.weight_VE.shape[0])
        partial_tE = F.embedding(rows_t.where(held_t, 0), self.weight_VE)
        return self._comm.all_reduce(partial_tE * held_t[:, None])


class VocabHead:
    """Output projection whose rows are spread over ranks; float32 logits of all ids."""

    def __init__(self, linear: Linear, vocab_size: int, comm: Communicator) -> None:
        self._linear = linear
        self._vocab_size = vocab_size
        self._comm = comm

    @property
    def weight_bytes(self) -> int:
        return self._linear.weight_bytes

    def __call__(self, hidden_sE: Tensor) -> Tensor:
        logits_sV = self._comm.all_gather_last_dim(self._linear(hidden_sE))
        return logits_sV[:, : self._vocab_size].float()


def _bytes(weight: Tensor, bias: Tensor | None) -> int:
    return weight.nbytes + (0 if bias is None else bias.nbytes)
