"""Which attention a rank uses: the fastest that works on its device."""

import logging

import torch

from worker.attention.base import AttentionBackend
from worker.attention.reference import ReferenceAttention
from worker.errors import BackendUnavailableError, DeviceError

logger = logging.getLogger(__name__)


def select_attention(
    device: torch.device, dtype: torch.dtype, cache_dtype: torch.dtype
) -> AttentionBackend:
    """The fastest backend for `device`, activations of `dtype` and a cache of `cache_dtype`; the
    reference, with a warning, where nothing else works. Raises DeviceError."""
    if device.type not in ("cpu", "cuda"):
        raise DeviceError(f"there is no attention for device {device}; use cpu or cuda")
    try:
        if device.type == "cpu":
            from worker.attention.cpu import CpuAttention

            return CpuAttention()
        from worker.attention.gpu import select_gpu_attention

        return select_gpu_attention(device, dtype, cache_dtype)
    except BackendUnavailableError as error:
        logger.warning("attention falls back to the slow reference: %s", error)
        return ReferenceAttention()
