"""The Triton kernel, on CPU by Triton's interpreter, against the definition in float64.

In a process of its own: the interpreter is chosen when Triton is first imported, and Triton
warns about it. It computes nothing in bfloat16, so half precision is tested in float16.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.component.test_attention import MIXED, check
from tests.support.attention import Piece, make_case
from worker.attention.base import AttentionBackend, AttentionRule
from worker.kv_cache import FP8

FEW = (Piece(1, 1), Piece(17, 1), Piece(70, 30), Piece(33, 2))
LONG = (Piece(1300, 1), Piece(3, 1), Piece(512, 1), Piece(513, 1))


@dataclass(frozen=True)
class Conformance:
    pieces: tuple[Piece, ...] = FEW
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    scales: tuple[float, float] = (1.0, 1.0)
    window: int | None = None
    softcap: float | None = None

    def check(self, backend: AttentionBackend, device: str) -> None:
        case = make_case(
            self.pieces,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=self.block_size,
            dtype=self.dtype,
            cache_dtype=self.cache_dtype,
            scales=self.scales,
            device=device,
        )
        check(backend, case, AttentionRule(self.head_dim**-0.5, self.window, self.softcap))


CASES = {
    "mixed": Conformance(),
    "groups of 3": Conformance(num_heads=9, num_kv_heads=3, head_dim=64),
    "one KV head, odd dimension": Conformance(num_heads=5, num_kv_heads=1, head_dim=20),
    "odd blocks": Conformance(block_size=3),
    "window and softcap": Conformance(window=9, softcap=5.0),
    "decodes": Conformance(LONG),
    "decodes in a window": Conformance(LONG[:2], window=600),
    "float16": Conformance(dtype=torch.float16),
    "fp8": Conformance(cache_dtype=FP8, scales=(0.5, 2.0)),
}


@pytest.fixture(scope="module")
def outcome() -> dict[str, str]:
    """What became of each case, from one process for all of them."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.component.test_triton"],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=115,
    )
    lines = [line.partition(": ") for line in done.stdout.splitlines()]
    assert len(lines) == len(CASES), done.stderr
    return {name: result for name, _, result in lines}


@pytest.mark.parametrize("name", CASES)
def test_conformance(outcome: dict[str, str], name: str) -> None:
    assert outcome[name] == "passed"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, FP8),
    ],
    ids=str,
)
def test_backends_of_this_gpu(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    """Whatever `select_attention` takes here passes its probe and the mixed case."""
    from worker.attention.select import select_attention

    backend = select_attention(torch.device("cuda", 0), dtype, cache_dtype)
    assert backend.name in ("flashinfer", "triton")
    Conformance(MIXED, dtype=dtype, cache_dtype=cache_dtype).check(backend, "cuda")


if __name__ == "__main__":
    from worker.attention.triton_kernels import TritonAttention

    for case_name, case in CASES.items():
        try:
            case.check(TritonAttention(), "cpu")
        except Exception as error:
            print(f"{case_name}: {type(error).__name__} {error}".replace("\n", " "))
        else:
            print(f"{case_name}: passed")
