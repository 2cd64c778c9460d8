"""The paged KV cache of one rank: its KV heads of its layers, for every logical block.

Layout: per layer one tensor [2, N, B, G, D]: K then V, N blocks, B slots, G KV heads of this
rank, D head dimension. So a slot's K of all heads is contiguous, a block is contiguous per K
and per V, and block ids mean the same on every rank. Block 0 is the null block: no sequence
holds it, so entries of a block table beyond a sequence's end may point to it.
"""

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.attention.base import LayerCache
from worker.errors import CacheTooSmallError, DeviceError
from worker.models.base import ModelSpec

logger = logging.getLogger(__name__)

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
CACHE_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8_e4m3": FP8,
}


def cache_dtype(name: str, model_dtype: torch.dtype) -> torch.dtype:
    """The dtype that `cache.kv_cache_dtype` names; "auto" is the model's."""
    if name == "auto":
        return model_dtype
    if name not in CACHE_DTYPES:
        raise DeviceError(f"kv_cache_dtype {name!r} is not known; use {', '.join(CACHE_DTYPES)}")
    return CACHE_DTYPES[name]


def block_bytes(spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block on this rank, all layers, K and V."""
    values = 2 * spec.num_layers * block_size * spec.num_kv_heads * spec.head_dim
    return values * int(dtype.itemsize)


@dataclass(frozen=True, slots=True)
class CacheSize:
    """How large the cache of a group is: the same number of blocks on every rank."""

    num_blocks: int
    """Including the null block."""
    block_size: int

    @property
    def capacity_tokens(self) -> int:
        """Tokens that all blocks but the null block hold."""
        return max(0, self.num_blocks - 1) * self.block_size

    def require(self, max_model_len: int, *, granted: str) -> None:
        """Raise CacheTooSmallError unless one sequence of `max_model_len` tokens fits.

        `granted` says where the number of blocks comes from, for the message.
        """
        needed = -(-max_model_len // self.block_size)
        if self.num_blocks - 1 < needed:
            raise CacheTooSmallError(
                f"{granted} gives {max(0, self.num_blocks - 1)} KV blocks of {self.block_size} "
                f"tokens, but one sequence of max_model_len {max_model_len} needs {needed}: set "
                f"max_model_len to at most {self.capacity_tokens}, or grant more memory"
            )

    def log(self, max_model_len: int, bytes_per_block: int) -> None:
        """One line: blocks, tokens, concurrency at full length."""
        logger.info(
            "KV cache: %d blocks of %d tokens (%.2f GiB on this rank), %d tokens in all, "
            "%.2f sequences of %d tokens at once",
            self.num_blocks,
            self.block_size,
            self.num_blocks * bytes_per_block / 2**30,
            self.capacity_tokens,
            self.capacity_tokens / max_model_len,
            max_model_len,
        )


class KVCache:
    """Owns the memory. Starts zeroed, because masked attention may multiply what it skips."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        size: CacheSize,
        dtype: torch.dtype,
        device: torch.device,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        """`k_scale`, `v_scale`: what a stored value is multiplied with to be read; they let
        fp8 (finite up to 448) hold larger or smaller values, and are 1 for other dtypes."""
        if dtype not in CACHE_DTYPES.values():
            raise DeviceError(f"the KV cache holds {', '.join(CACHE_DTYPES)}, not {dtype}")
        if dtype != FP8 and (k_scale, v_scale) != (1.0, 1.0):
            raise ValueError("KV scales are for float8_e4m3fn only")
        self.size = size
        self.dtype = dtype
        shape = (2, size.num_blocks, size.block_size, spec.num_kv_heads, spec.head_dim)
        pages = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(spec.num_layers)]
        self.layers = tuple(LayerCache(k, v, k_scale, v_scale) for k, v in pages)


def quantized(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """`x` as the cache stores it. Beyond the range of fp8 it saturates, it does not overflow."""
    if dtype == FP8:
        return (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return x.to(dtype)


def store(cache: LayerCache, slot_t: Tensor, k_tGD: Tensor, v_tGD: Tensor) -> None:
    """Write the K and V of t tokens into their slots."""
    for pages, new, scale in (
        (cache.k_NBGD, k_tGD, cache.k_scale),
        (cache.v_NBGD, v_tGD, cache.v_scale),
    ):
        slots, values = pages.flatten(0, 1), quantized(new, pages.dtype, scale)
        if pages.dtype == FP8:  # index_copy_ does not know it; the bytes are what matters
            slots, values = slots.view(torch.uint8), values.view(torch.uint8)
        slots.index_copy_(0, slot_t, values)
