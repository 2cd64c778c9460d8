"""Rotary position embeddings: frequencies by kind, and the rotation of q and k.

Shape letters as in `worker.models.base`; N = H + G, the query and KV heads side by side.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from worker.models.config import RopeConfig
from worker.models.cpu_kernels import InPlaceRotation, has_kernel
from worker.models.norms import HeadNorm


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each of the D/2 rotated planes, float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    match rope.kind:
        case "linear":
            return frequencies / rope.factor
        case "llama3":
            return _llama3(rope, frequencies)
        case "yarn":
            return _yarn(rope, frequencies, head_dim)
    return frequencies


def _llama3(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """Planes that turn often within the trained length stay, those that turn seldom slow down.

    Turns are counted over the trained length; between `low_freq_factor` and
    `high_freq_factor` turns the two are blended linearly.
    """
    turns = rope.original_max_position * frequencies / (2 * math.pi)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return torch.lerp(frequencies / rope.factor, frequencies, kept.clamp(0.0, 1.0))


def _yarn(rope: RopeConfig, frequencies: Tensor, head_dim: int) -> Tensor:
    """As llama3, but blended linearly in the index of the plane, not in its frequency."""

    def plane_with(turns: float) -> float:
        ratio = rope.original_max_position / (turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

    first, last = plane_with(rope.beta_fast), plane_with(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    planes = torch.arange(head_dim // 2, dtype=torch.float32)
    slowed = (planes - first) / (max(last - first, 0.001))
    return torch.lerp(frequencies, frequencies / rope.factor, slowed.clamp(0.0, 1.0))


class Rotation(Protocol):
    """Turns the heads of one batch by its positions; the same for all layers of a step."""

    def __call__(self, x_tND: Tensor, norm: HeadNorm | None) -> Tensor:
        """The rotated heads, normalized before that; may be written over `x_tND`."""
        ...


@dataclass(frozen=True, slots=True)
class TorchRotation:
    cos_t1D: Tensor
    sin_t1D: Tensor
    """The first half negated, so that rolling a head by D/2 needs no negation."""

    def __call__(self, x_tND: Tensor, norm: HeadNorm | None) -> Tensor:
        if norm is not None:
            x_tND = norm(x_tND)
        rolled_tND = torch.roll(x_tND, x_tND.shape[-1] // 2, -1)
        return torch.addcmul(x_tND * self.cos_t1D, rolled_tND, self.sin_t1D)


class Rope:
    """Makes the rotation of a batch from its positions; angles are float32 in every dtype."""

    def __init__(
        self, rope: RopeConfig, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._frequencies = inverse_frequencies(rope, head_dim).to(device)
        self._scale = rope.attention_factor
        self._dtype = dtype
        self._in_place = device.type == "cpu" and has_kernel("rotary")

    def __call__(self, position_ids_t: Tensor) -> Rotation:
        angles = position_ids_t[:, None].float() * self._frequencies
        cos, sin = angles.cos() * self._scale, angles.sin() * self._scale
        if self._in_place:
            return InPlaceRotation(cos, sin)
        cos, sin = cos.to(self._dtype), sin.to(self._dtype)
        return TorchRotation(
            torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1)
        )
