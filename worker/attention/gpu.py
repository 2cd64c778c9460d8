"""Which attention a GPU rank uses: a library where it is installed and right, else our kernel.

flash-attn is not among them: its paged kernels want blocks of 256 tokens, sixteen times ours, and
FlashInfer has kernels of that kind for blocks of any size.
"""

import importlib.util
import logging

import torch

from worker.attention.base import AttentionBackend, AttentionBatch, AttentionRule, LayerCache
from worker.attention.reference import ReferenceAttention
from worker.errors import BackendUnavailableError
from worker.kv_cache import FP8, quantized

logger = logging.getLogger(__name__)


def select_gpu_attention(
    device: torch.device, dtype: torch.dtype, cache_dtype: torch.dtype
) -> AttentionBackend:
    """FlashInfer if it is installed, else Triton; each has to pass a probe on `device` first.

    Raises BackendUnavailableError when neither does.
    """
    reasons = []
    for name, make in (("flashinfer", _flashinfer), ("triton", _triton)):
        if importlib.util.find_spec(name) is None:
            reasons.append(f"{name} is not installed")
            continue
        try:
            backend = make(device)
            probe(backend, device, dtype, cache_dtype)
        except Exception as error:  # whatever a library raises, the next one may work
            reasons.append(f"{name} does not work here ({type(error).__name__}: {error})")
            logger.warning("attention: %s", reasons[-1])
            continue
        return backend
    raise BackendUnavailableError("; ".join(reasons))


def _flashinfer(device: torch.device) -> AttentionBackend:
    from worker.attention.flashinfer_backend import FlashInferAttention

    return FlashInferAttention(device)


def _triton(device: torch.device) -> AttentionBackend:
    from worker.attention.triton_kernels import TritonAttention

    return TritonAttention()


def probe(
    backend: AttentionBackend, device: torch.device, dtype: torch.dtype, cache_dtype: torch.dtype
) -> None:
    """Compare a chunk and a decode with the reference; raises BackendUnavailableError."""
    generator = torch.Generator().manual_seed(0)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    q_tHD, k_tGD, v_tGD = made(21, 4, 64), made(21, 2, 64), made(21, 2, 64)
    scales = (0.5, 2.0) if cache_dtype == FP8 else (1.0, 1.0)
    k_NBGD, v_NBGD = (quantized(made(8, 16, 2, 64), cache_dtype, scale) for scale in scales)
    block_ids_sb = torch.tensor([[5, 2, 7], [3, 1, 0]], dtype=torch.int32, device=device)
    slots = [*range(80, 96), *range(32, 36), 3 * 16 + 9]
    batch = AttentionBatch(
        query_start_s1=torch.tensor([0, 20, 21], dtype=torch.int32, device=device),
        kv_len_s=torch.tensor([20, 10], dtype=torch.int32, device=device),
        block_ids_sb=block_ids_sb,
        slot_t=torch.tensor(slots, device=device),
        max_query_tokens=20,
        max_kv_tokens=20,
    )
    rule = AttentionRule(0.125)
    found, expected = (
        attend.attend(
            q_tHD, k_tGD, v_tGD, LayerCache(k_NBGD.clone(), v_NBGD.clone(), *scales), batch, rule
        )
        for attend in (backend, ReferenceAttention())
    )
    difference = float((found.float() - expected.float()).abs().max())
    if not difference < 0.05:
        raise BackendUnavailableError(f"it is off by {difference:.3g} from the reference")
