"""Every form of a linear layer against float64, and what our kernel promises beyond."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.dense import logits_of
from tests.support.models import make_model
from tests.support.thread_group import run_ranks
from worker.models import linear, rope
from worker.models.base import Communicator, Solo
from worker.models.config import RopeConfig
from worker.models.cpu_kernels import (
    InPlaceRotation,
    PackedLinear,
    has_kernel,
    has_matrix_units,
)
from worker.models.faster_modules import exchange_linears
from worker.models.linear import (
    PlainLinear,
    ReorderedLinear,
    SeparateNormedLinear,
    SummedResidualLinear,
    WideningLinear,
    make_linear,
    plain_gate,
)
from worker.models.norms import HeadNorm, Norm
from worker.models.registry import load_decoder
from worker.models.rope import Rope

EPSILON = 1e-5
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
# Rows and widths on and off the kernel's tiles of 6 or 12 rows and 16 or 32 columns.
SHAPES = [(1, 64, 48), (2, 70, 33), (3, 7, 5), (6, 64, 31), (13, 96, 64), (40, 65, 100)]

PACKED = [(dtype, False) for dtype in DTYPES]
"""Every form of our kernel that this CPU has: dtype, and whether it is for matrix units."""
if has_kernel("linear"):
    PACKED += [(dtype, True) for dtype in DTYPES if has_matrix_units(dtype)]

Kind = Callable[..., Any]


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (scale * torch.randn(*shape, generator=generator)).to(dtype)


def assert_near(actual: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    assert actual.shape == exact.shape
    error = (actual.double() - exact).abs().max()
    assert error <= ROUNDING[dtype] * exact.abs().max().clamp(min=1)


def test_the_kernel_is_there() -> None:
    """Otherwise the tests below would say nothing about it."""
    assert has_kernel("linear")
    assert has_kernel("rotary")
    assert has_kernel("rows")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((partial(PackedLinear, tiled=tiled), dtype) for dtype, tiled in PACKED),
        *((PlainLinear, dtype) for dtype in DTYPES),
        *((make_linear, dtype) for dtype in DTYPES),
        (WideningLinear, torch.bfloat16),
        (WideningLinear, torch.float16),
        # What oneDNN does in half precision too, on CPUs that have the instructions.
        (ReorderedLinear, torch.float32),
    ],
)
def test_product(kind: Kind, dtype: torch.dtype, shape: tuple[int, int, int], bias: bool) -> None:
    rows, width, height = shape
    x, weight = random(rows, width, dtype=dtype), random(height, width, dtype=dtype, scale=0.2)
    bias_O = random(height, dtype=dtype) if bias else None
    exact = F.linear(x.double(), weight.double(), None if bias_O is None else bias_O.double())
    assert_near(kind(weight.clone(), bias_O)(x), exact, dtype)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "tiled"), PACKED)
def test_norm_product_and_gate_in_one(
    dtype: torch.dtype, tiled: bool, shape: tuple[int, int, int], gated: bool
) -> None:
    rows, width, height = shape
    height *= 2 if gated else 1
    x, weight = random(rows, width, dtype=dtype), random(height, width, dtype=dtype, scale=0.2)
    bias_O, norm = random(height, dtype=dtype), Norm(random(width, dtype=dtype), EPSILON)
    exact = F.linear(
        F.rms_norm(x.double(), (width,), norm.weight_E.double(), EPSILON),
        weight.double(),
        bias_O.double(),
    )
    if gated:
        gate, up = exact.chunk(2, -1)
        exact = F.silu(gate) * up
    norm_of = {"norm_weight_I": norm.weight_E, "epsilon": EPSILON}
    one = PackedLinear(weight, bias_O, **norm_of, gated=gated, tiled=tiled)
    assert_near(one(x), exact, dtype)
    separate = SeparateNormedLinear(
        norm, PlainLinear(weight, bias_O), plain_gate if gated else None
    )
    error = (separate(x).double() - exact).abs().max()
    assert error <= 4 * ROUNDING[dtype] * exact.abs().max().clamp(min=1)


@pytest.mark.parametrize(("dtype", "tiled"), PACKED)
def test_residual(dtype: torch.dtype, tiled: bool) -> None:
    x, weight = random(9, 40, dtype=dtype), random(70, 40, dtype=dtype, scale=0.2)
    residual = random(9, 100, dtype=dtype)[:, 20:90]
    exact = residual.double() + F.linear(x.double(), weight.double())
    assert_near(PackedLinear(weight, tiled=tiled)(x, residual), exact, dtype)
    summed = SummedResidualLinear(PlainLinear(weight), Solo())(x, residual)
    assert_near(summed, exact, dtype)


@pytest.mark.parametrize(("dtype", "tiled"), PACKED)
def test_rows_do_not_see_each_other(dtype: torch.dtype, tiled: bool) -> None:
    """The same bits for a row in any batch: what makes results independent of batch mates."""
    weight, norm_weight = random(96, 130, dtype=dtype), random(130, dtype=dtype)
    norm = {"norm_weight_I": norm_weight, "epsilon": EPSILON}
    layer = PackedLinear(weight, **norm, gated=True, tiled=tiled)
    x = random(50, 130, dtype=dtype)
    alone = torch.cat([layer(row) for row in x.split(1)])
    for rows in (2, 3, 7, 12, 17, 25, 33, 50):
        assert torch.equal(torch.cat([layer(part) for part in x.split(rows)]), alone)


@pytest.mark.parametrize("rows", [1, 50, 500])
@pytest.mark.parametrize(("dtype", "tiled"), PACKED)
def test_threads_do_not_change_a_bit(dtype: torch.dtype, tiled: bool, rows: int) -> None:
    weight, x = random(300, 130, dtype=dtype), random(rows, 130, dtype=dtype)
    layer = PackedLinear(weight, tiled=tiled)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = layer(x)
        torch.set_num_threads(3)
        assert torch.equal(layer(x), one)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(("dtype", "tiled"), PACKED)
def test_weights_larger_than_a_cache(dtype: torch.dtype, tiled: bool) -> None:
    x, weight = random(70, 1000, dtype=dtype), random(1500, 1000, dtype=dtype, scale=0.02)
    exact = F.linear(x.double(), weight.double())
    assert_near(PackedLinear(weight, tiled=tiled)(x), exact, dtype)


def test_rows_apart_in_memory() -> None:
    x = random(8, 200, dtype=torch.bfloat16)[:, 50:114]
    weight = random(40, 64, dtype=torch.bfloat16)
    assert torch.equal(PackedLinear(weight)(x), PackedLinear(weight)(x.contiguous()))


def test_no_rows() -> None:
    assert PackedLinear(random(40, 64, dtype=torch.float32))(torch.empty(0, 64)).shape == (0, 40)


def test_what_does_not_fit_is_caught_before_memory_is_read() -> None:
    layer = PackedLinear(random(40, 64, dtype=torch.bfloat16))
    with pytest.raises(AssertionError):
        layer(torch.ones(1, 64))
    with pytest.raises(AssertionError):
        layer(torch.ones(1, 63, dtype=torch.bfloat16))
    with pytest.raises(AssertionError):
        layer(torch.ones(64, 2, dtype=torch.bfloat16).T)
    with pytest.raises(AssertionError):
        PackedLinear(random(40, 64, dtype=torch.float32), tiled=True)


def test_extreme_gates_are_finite() -> None:
    weight = torch.tensor([[1.0], [1.0]])
    x = torch.tensor([[-1e30], [-100.0], [-88.0], [0.0], [88.0], [1e15]])
    gated = PackedLinear(weight, gated=True)(x)
    assert torch.allclose(gated, F.silu(x) * x)


@pytest.mark.parametrize("head_dim", [8, 64, 80])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 5, 40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotation_in_place_is_that_of_torch(
    dtype: torch.dtype,
    num_tokens: int,
    normed: bool,
    head_dim: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = RopeConfig("default", 10_000.0, attention_factor=1.25)
    norm = HeadNorm(random(5, head_dim, dtype=torch.float32), EPSILON) if normed else None
    positions_t = torch.arange(num_tokens) * 7
    qkv_tND = random(num_tokens, 7, head_dim, dtype=dtype)
    qk_tND, v_tGD = qkv_tND.split((5, 2), dim=1)
    untouched = v_tGD.clone()
    monkeypatch.setattr(rope, "has_kernel", lambda name: False)
    exact = Rope(config, head_dim, torch.float64, torch.device("cpu"))(positions_t)(
        qk_tND.double(), norm
    )
    monkeypatch.undo()
    rotation = Rope(config, head_dim, dtype, torch.device("cpu"))(positions_t)
    assert isinstance(rotation, InPlaceRotation)
    assert_near(rotation(qk_tND, norm), exact, dtype)
    assert torch.equal(v_tGD, untouched)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama-biases-tied", "qwen3"])
def test_without_a_compiler_the_model_is_the_same(
    name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_model(name, tmp_path)
    prompt = {0: list(range(3, 43))}  # the embedding of 0, padding, is zero
    fast = load_decoder(directory, dtype=dtype)
    for module in (linear, rope):
        monkeypatch.setattr(module, "has_kernel", lambda name: False)
    plain = load_decoder(directory, dtype=dtype)
    assert plain.spec.weight_bytes <= fast.spec.weight_bytes
    ours, theirs = (logits_of([decoder], [prompt])[0] for decoder in (fast, plain))
    difference = (ours - theirs).abs().amax(1) / theirs.abs().amax(1)
    assert difference.median() <= (1e-5 if dtype == "float32" else 0.05)


@pytest.mark.parametrize("size", [1, 2])
def test_weights_are_held_once(size: int, tmp_path: Path) -> None:
    """All ranks and stages together: the checkpoint, with norms once per rank, plus padding."""
    directory = make_model("llama", tmp_path)
    stored = (directory / "model.safetensors").stat().st_size
    held = 0
    for stage in range(3):

        def load(comm: Communicator, stage: int = stage) -> int:
            decoder = load_decoder(directory, dtype="float32", comm=comm, stage=stage, num_stages=3)
            return decoder.spec.weight_bytes

        held += sum(run_ranks(size, load))
    assert 0.98 * stored <= held <= 1.10 * stored


def test_an_exchanged_linear_takes_input_in_any_order() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 40, bias=False))
    weight, x = random(40, 64, dtype=torch.float32), random(1, 64, 3, dtype=torch.float32)
    model[0].weight.data.copy_(weight)
    exchange_linears(model)
    with torch.inference_mode():
        found = model(x.transpose(1, 2))
    torch.testing.assert_close(found, F.linear(x.transpose(1, 2), weight))
