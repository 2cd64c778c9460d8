"""What this machine can do at most, and so how long a step of a model takes at least."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from worker.models.base import ModelSpec

_MATRIX_WIDTH = 1024
_STREAM_BYTES = 256 << 20
_TRIES = 20


@dataclass(frozen=True, slots=True)
class Machine:
    flops: float
    """Of a large float32 matrix product, a second."""
    read_bytes: float
    """From memory, a second."""

    @classmethod
    def measured(cls) -> Self:
        """With torch's number of threads; takes about a second."""
        a, b = torch.randn(2, _MATRIX_WIDTH, _MATRIX_WIDTH)
        stream = torch.ones(_STREAM_BYTES // 4)
        return cls(
            flops=2 * _MATRIX_WIDTH**3 / _fastest(lambda: a @ b),
            read_bytes=_STREAM_BYTES / _fastest(stream.sum),
        )

    def or_better(self, other: Self) -> Self:
        """Measured twice: a neighbour makes a machine look slower, nothing makes it look faster."""
        return type(self)(max(self.flops, other.flops), max(self.read_bytes, other.read_bytes))

    def __str__(self) -> str:
        return (
            f"{self.flops / 1e9:.0f} GFLOP/s in float32, "
            f"{self.read_bytes / 1e9:.1f} GB/s from memory"
        )


def _fastest(act: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_TRIES):
        began = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


@dataclass(frozen=True, slots=True)
class StepCost:
    """What a step of a model has to multiply and to read, however well it is written."""

    layer_weights: int
    """Parameters that every token is multiplied with."""
    head_weights: int
    """And those that every sampled token is."""
    spec: ModelSpec

    @classmethod
    def of(cls, directory: Path, spec: ModelSpec) -> Self:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
        head = model.get_output_embeddings().weight.numel()
        linears = (m for m in model.modules() if isinstance(m, torch.nn.Linear))
        return cls(sum(linear.weight.numel() for linear in linears) - head, head, spec)

    def decode_seconds(self, machine: Machine, batch: int, context: int) -> float:
        weights, spec = self.layer_weights + self.head_weights, self.spec
        keys = batch * context * spec.num_layers * spec.head_dim
        flops = 2 * batch * weights + 4 * keys * spec.num_heads
        read = spec.dtype.itemsize * (weights + 2 * keys * spec.num_kv_heads)
        return max(flops / machine.flops, float(read) / machine.read_bytes)

    def prefill_seconds(self, machine: Machine, length: int) -> float:
        spec = self.spec
        pairs = length * length / 2 * spec.num_layers * spec.head_dim
        flops = 2 * length * self.layer_weights + 4 * pairs * spec.num_heads
        return flops / machine.flops
