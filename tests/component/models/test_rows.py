"""Norm and gate of rows by our kernel: against float64, and what it promises beyond."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from worker.models import linear
from worker.models.cpu_kernels import RowNorm, gate_rows
from worker.models.linear import PlainLinear, make_normed_linear
from worker.models.norms import Norm

EPSILON = 1e-5
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
# On and off vectors of 8 and 16, and four of them at once.
WIDTHS = [1, 7, 16, 63, 64, 131, 576]
# By one thread and by several, which begin at 16,384 elements.
ROWS = [0, 1, 5, 300]


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (scale * torch.randn(*shape, generator=generator)).to(dtype)


def assert_rounded(actual: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """Each element by itself: it is as near as the dtype allows, down to its subnormals."""
    assert actual.dtype == dtype
    rounding = ROUNDING[dtype]
    torch.testing.assert_close(actual.double(), exact, rtol=rounding, atol=1e-7)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm(dtype: torch.dtype, rows: int, width: int) -> None:
    x, weight = random(rows, width, dtype=dtype, scale=3.0), random(width, dtype=dtype)
    exact = F.rms_norm(x.double(), (width,), weight.double(), EPSILON)
    assert_rounded(RowNorm(weight, EPSILON)(x), exact, dtype)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gate(dtype: torch.dtype, rows: int, width: int) -> None:
    x = random(rows, 2 * width, dtype=dtype, scale=3.0)
    gate, up = x.double().chunk(2, -1)
    assert_rounded(gate_rows(x), F.silu(gate) * up, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_gates(dtype: torch.dtype) -> None:
    gate = torch.tensor([-30000.0, -100.0, -88.0, -20.0, -0.0, 0.0, 20.0, 88.0, 100.0, 30000.0])
    x = torch.cat([gate, torch.full_like(gate, 2.0)]).to(dtype)[None]
    gate, up = x.double().chunk(2, -1)
    assert_rounded(gate_rows(x), F.silu(gate) * up, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_are_rounded_as_torch_does(dtype: torch.dtype) -> None:
    """Ties, the step to infinity, NaN: the norm of a 1 is its weight, rounded.

    Subnormal bfloat16 may become zeros: what a CPU's own instruction does.
    """
    bits = torch.randint(-(2**31), 2**31 - 1, (40_000,), generator=torch.Generator().manual_seed(0))
    ties = torch.arange(-(2**15), 2**15) * 2**16 + 2**15
    weight = torch.cat([bits, ties, ties + 1, ties - 1]).int().view(torch.float32)
    normed = RowNorm(weight, 0.0)(torch.ones(1, len(weight), dtype=dtype))[0]
    atol = torch.finfo(dtype).tiny if dtype == torch.bfloat16 else 0.0
    torch.testing.assert_close(normed, weight.to(dtype), rtol=0, atol=atol, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_and_zero_rows(dtype: torch.dtype) -> None:
    x = torch.stack([torch.full((70,), 3e4), torch.zeros(70), torch.full((70,), 1e-4)]).to(dtype)
    exact = F.rms_norm(x.double(), (70,), None, EPSILON)
    assert_rounded(RowNorm(torch.ones(70), EPSILON)(x), exact, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_do_not_see_each_other(dtype: torch.dtype) -> None:
    """The same bits for a row in any batch, wherever it lies in memory."""
    x = random(300, 262, dtype=dtype)
    norm = RowNorm(random(262, dtype=dtype), EPSILON)
    for function in (norm, gate_rows):
        alone = torch.cat([function(row.clone()) for row in x.split(1)])
        for rows in (2, 7, 33, 300):
            assert torch.equal(torch.cat([function(part) for part in x.split(rows)]), alone)


def test_rows_apart_in_memory() -> None:
    x = random(9, 200, dtype=torch.bfloat16)[:, 51:121]
    norm = RowNorm(random(70, dtype=torch.bfloat16), EPSILON)
    for function in (norm, gate_rows):
        assert torch.equal(function(x), function(x.contiguous()))


def test_another_width_is_caught_before_memory_is_read() -> None:
    with pytest.raises(AssertionError):
        RowNorm(torch.ones(64), EPSILON)(torch.ones(1, 63))
    with pytest.raises(AssertionError):
        gate_rows(torch.ones(1, 63))


@pytest.mark.parametrize("compiler", [True, False])
@pytest.mark.parametrize("gated", [False, True])
def test_around_the_product_of_another_library(
    gated: bool, compiler: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "_packs", lambda weight: False)
    monkeypatch.setattr(linear, "make_linear", PlainLinear)
    if not compiler:
        monkeypatch.setattr(linear, "has_kernel", lambda name: False)
    x, weight = random(5, 40, dtype=torch.float32), random(60, 40, dtype=torch.float32)
    norm = Norm(random(40, dtype=torch.float32), EPSILON)
    exact = F.linear(norm(x), weight)
    if gated:
        exact = F.silu(exact[:, :30]) * exact[:, 30:]
    torch.testing.assert_close(make_normed_linear(norm, weight, gated=gated)(x), exact)
