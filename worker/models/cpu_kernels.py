"""What our own CPU kernels compute of a decoder, `worker/native/{linear,rotary,rows}.cpp`.

Shape letters: t rows, E hidden size, F width of the gated MLP, I input width, O output width;
N heads, D head dimension.
"""

import ctypes
import logging
from ctypes import c_float, c_int32, c_int64, c_void_p
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.errors import BackendUnavailableError
from worker.models.norms import HeadNorm
from worker.native import load

_log = logging.getLogger(__name__)

_TILE_DEPTH = 32
"""bfloat16 in a row of a tile, as in matrix_units.hpp."""

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class _LinearArgs(ctypes.Structure):
    """`Args` of linear.cpp, field by field."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "packed", "residual", "bias", "norm_weight", "y")),
        *((name, c_int64) for name in ("x_stride", "residual_stride", "y_stride")),
        *((name, c_int64) for name in ("rows", "in_width", "out_width")),
        ("epsilon", c_float),
        *((name, c_int32) for name in ("dtype", "gated", "tiled", "num_threads")),
    )


class _RotaryArgs(ctypes.Structure):
    """`Args` of rotary.cpp, field by field."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "cosines", "sines", "norm_weight")),
        *((name, c_int64) for name in ("x_stride", "tokens")),
        ("epsilon", c_float),
        *((name, c_int32) for name in ("heads", "head_dim", "dtype", "num_threads")),
    )


class _RowsArgs(ctypes.Structure):
    """`Args` of rows.cpp, field by field."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "norm_weight", "y")),
        *((name, c_int64) for name in ("x_stride", "rows", "width")),
        ("epsilon", c_float),
        *((name, c_int32) for name in ("dtype", "num_threads")),
    )


@cache
def has_kernel(name: str) -> bool:
    """Whether `name` can be built here; says so once where it cannot."""
    try:
        load(name)
    except BackendUnavailableError as error:
        _log.warning("The model runs in plain torch, several times slower on this CPU: %s", error)
        return False
    return True


@cache
def _linear_library() -> Any:
    library = load("linear")
    library.linear.argtypes = [ctypes.POINTER(_LinearArgs)]
    library.linear.restype = None
    return library


@cache
def has_matrix_units(dtype: torch.dtype) -> bool:
    """Whether our kernel multiplies in `dtype` on the matrix units of this CPU."""
    return dtype == torch.bfloat16 and bool(_linear_library().linear_has_tiles())


@cache
def _rotary_library() -> Any:
    library = load("rotary")
    library.rotate.argtypes = [ctypes.POINTER(_RotaryArgs)]
    library.rotate.restype = None
    return library


@cache
def _rows_library() -> Any:
    library = load("rows")
    for function in (library.norm_rows, library.gate_rows):
        function.argtypes = [ctypes.POINTER(_RowsArgs)]
        function.restype = None
    return library


class PackedLinear:
    """y = f(norm(x) W^T + bias); f is nothing, silu(gate) * up, or an added residual.

    The norm before and what follows a product cost no pass over the activations of their own.
    A row's result does not depend on the other rows of its batch. Holds a reordered copy of
    the weights; the caller drops the original. Needs `has_kernel("linear")`.
    """

    shares_weight = False

    def __init__(
        self,
        weight_OI: Tensor,
        bias_O: Tensor | None = None,
        *,
        norm_weight_I: Tensor | None = None,
        epsilon: float = 0.0,
        gated: bool = False,
        tiled: bool | None = None,
    ) -> None:
        """With `gated`, the first half of W gives the gate and the second what it gates.

        `tiled`: for the CPU's matrix units; None: where it has them.
        """
        self._run = _linear_library().linear
        columns = _linear_library().packed_columns()
        can_tile = has_matrix_units(weight_OI.dtype)
        assert can_tile or not tiled, f"no matrix units for {weight_OI.dtype} here"
        self._tiled = can_tile if tiled is None else tiled
        self._packed = _pack(weight_OI, columns, gated, self._tiled)
        # The kernel reads these vectors in float32 whatever the dtype of the weights.
        self._bias = None
        if bias_O is not None:
            self._bias = _pack(bias_O.float()[:, None], columns, gated).flatten()
        self._norm_weight_I = None if norm_weight_I is None else norm_weight_I.float()
        self._epsilon = epsilon
        self._gated = gated
        self._in_width = weight_OI.shape[1]
        self._out_width = weight_OI.shape[0] // (2 if gated else 1)
        self.weight_bytes = sum(
            vector.nbytes
            for vector in (self._packed, self._bias, self._norm_weight_I)
            if vector is not None
        )

    def __call__(self, x_tI: Tensor, residual_tO: Tensor | None = None) -> Tensor:
        """Both inputs have the dtype of the weights, and no gaps within a row."""
        assert x_tI.dtype == self._packed.dtype, f"{x_tI.dtype} times {self._packed.dtype}"
        assert x_tI.shape[1] == self._in_width
        assert x_tI.stride(1) == 1 or self._in_width == 1
        y_tO = torch.empty((x_tI.shape[0], self._out_width), dtype=x_tI.dtype)
        args = _LinearArgs(
            x_tI.data_ptr(),
            self._packed.data_ptr(),
            None if residual_tO is None else residual_tO.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            None if self._norm_weight_I is None else self._norm_weight_I.data_ptr(),
            y_tO.data_ptr(),
            x_tI.stride(0),
            0 if residual_tO is None else residual_tO.stride(0),
            self._out_width,
            x_tI.shape[0],
            self._in_width,
            self._out_width,
            self._epsilon,
            _DTYPES[self._packed.dtype],
            self._gated,
            self._tiled,
            torch.get_num_threads(),
        )
        self._run(ctypes.byref(args))
        return y_tO


def _pack(weight_OI: Tensor, columns: int, gated: bool, tiled: bool = False) -> Tensor:
    """Blocks of `columns` rows; zeros fill up what is not whole.

    A block has two halves of `lanes` rows, which are gates and what they gate if `gated`.
    [blocks, I, columns], where in bfloat16 the columns of both halves stand in turn (`load_pair`
    in vectors.hpp); or if `tiled` [blocks, tiles deep, half, pairs of I, lanes, 2 of I]
    (matrix_units.hpp). Needs no memory but that of the result, if I is whole tiles.
    """
    weight, lanes = weight_OI, columns // 2
    blocks, whole = -(-len(weight) // columns), len(weight) // columns
    if tiled:
        pairs = _TILE_DEPTH // 2
        if weight.shape[1] % _TILE_DEPTH:
            weight = F.pad(weight, (0, -weight.shape[1] % _TILE_DEPTH))
        weight = weight.unflatten(1, (-1, pairs, 2))
        packed = weight.new_zeros(blocks, weight.shape[1], 2, pairs, lanes, 2)
        places = packed.permute(2, 0, 4, 1, 3, 5)
    else:
        packed = weight.new_zeros(blocks, weight.shape[1], columns)
        if weight.dtype == torch.bfloat16:
            places = packed.unflatten(2, (lanes, 2)).permute(3, 0, 2, 1)
        else:
            places = packed.unflatten(2, (2, lanes)).permute(2, 0, 3, 1)
    # A place is one half of every block: [blocks, lanes, then as `weight`].
    for half, place in enumerate(places):
        if gated:
            rows = weight.chunk(2)[half]
            first = rows[: whole * lanes].unflatten(0, (whole, lanes))
            last = rows[whole * lanes :]
        else:
            first = weight[: whole * columns].unflatten(0, (whole, 2, lanes))[:, half]
            last = weight[whole * columns + half * lanes :][:lanes]
        place[:whole] = first
        if len(last):
            place[whole, : len(last)] = last
    return packed


class RowNorm:
    """RMSNorm. A row's result does not depend on the other rows of its batch.

    Needs `has_kernel("rows")`.
    """

    def __init__(self, weight_E: Tensor, epsilon: float) -> None:
        self.weight_E = weight_E.float()
        """float32 in every dtype of the model."""
        self._epsilon = epsilon

    def __call__(self, x_tE: Tensor) -> Tensor:
        """No gaps within a row of `x_tE`."""
        width = len(self.weight_E)
        assert x_tE.shape[1] == width
        return _computed(_rows_library().norm_rows, x_tE, width, self.weight_E, self._epsilon)


def gate_rows(x_tO: Tensor) -> Tensor:
    """silu(gate) * up, where a row is gate and up side by side, without gaps: O = 2 F.

    A row's result does not depend on the other rows of its batch. Needs `has_kernel("rows")`.
    """
    assert x_tO.shape[1] % 2 == 0
    return _computed(_rows_library().gate_rows, x_tO, x_tO.shape[1] // 2)


def _computed(
    function: Any, x: Tensor, width: int, norm_weight_E: Tensor | None = None, epsilon: float = 0.0
) -> Tensor:
    y = torch.empty((len(x), width), dtype=x.dtype)
    args = _RowsArgs(
        x.data_ptr(),
        None if norm_weight_E is None else norm_weight_E.data_ptr(),
        y.data_ptr(),
        x.stride(0),
        len(x),
        width,
        epsilon,
        _DTYPES[x.dtype],
        torch.get_num_threads(),
    )
    function(ctypes.byref(args))
    return y


class InPlaceRotation:
    """Implements `worker.models.rope.Rotation`, writing over its input."""

    def __init__(self, cosines_tP: Tensor, sines_tP: Tensor) -> None:
        """float32, one column per rotated plane: P = D / 2."""
        self._run = _rotary_library().rotate
        self._cosines_tP = cosines_tP
        self._sines_tP = sines_tP

    def __call__(self, x_tND: Tensor, norm: HeadNorm | None) -> Tensor:
        """Heads lie side by side; tokens may be further apart."""
        num_tokens, num_heads, head_dim = x_tND.shape
        assert self._cosines_tP.shape == (num_tokens, head_dim // 2)
        args = _RotaryArgs(
            x_tND.data_ptr(),
            self._cosines_tP.data_ptr(),
            self._sines_tP.data_ptr(),
            None if norm is None else norm.weight_ND.data_ptr(),
            x_tND.stride(0),
            num_tokens,
            0.0 if norm is None else norm.epsilon,
            num_heads,
            head_dim,
            _DTYPES[x_tND.dtype],
            torch.get_num_threads(),
        )
        self._run(ctypes.byref(args))
        return x_tND
