"""The fast path on CPU: the C++ kernel of `worker/native/attention.cpp`."""

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from worker.attention.base import AttentionBatch, AttentionRule, LayerCache
from worker.errors import DeviceError
from worker.kv_cache import FP8, store
from worker.native import load

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, FP8: 3}


class _Args(ctypes.Structure):
    """`Args` of the kernel, field by field."""

    _fields_ = (
        *((name, c_void_p) for name in ("q", "k", "v", "out", "k_pages", "v_pages")),
        *((name, c_void_p) for name in ("query_start", "kv_len", "block_ids", "slots")),
        *((name, c_int64 * 2) for name in ("q_strides", "k_strides", "v_strides")),
        *((name, c_int64) for name in ("num_tokens", "num_seqs", "blocks_per_seq")),
        *((name, c_int32) for name in ("num_heads", "num_kv_heads", "head_dim", "block_size")),
        *((name, c_int32) for name in ("activation_dtype", "cache_dtype")),
        *((name, c_int32) for name in ("window", "num_threads")),
        *((name, c_float) for name in ("score_scale", "value_scale", "softcap")),
    )


class CpuAttention:
    """Raises BackendUnavailableError at construction when the kernel cannot be built."""

    name = "cpu"

    def __init__(self) -> None:
        self._kernel = load("attention").paged_attention
        self._kernel.argtypes = [ctypes.POINTER(_Args)]
        self._kernel.restype = None

    def attend(
        self,
        q_tHD: Tensor,
        k_tGD: Tensor,
        v_tGD: Tensor,
        cache: LayerCache,
        batch: AttentionBatch,
        rule: AttentionRule,
    ) -> Tensor:
        if q_tHD.dtype not in _DTYPES or q_tHD.dtype == FP8:
            raise DeviceError(f"attention on CPU takes no queries of {q_tHD.dtype}")
        pages = cache.k_NBGD
        same = k_tGD.dtype == v_tGD.dtype == pages.dtype
        if not same:
            store(cache, batch.slot_t, k_tGD, v_tGD)
        num_tokens, num_heads, head_dim = q_tHD.shape
        out_tHD = torch.empty((num_tokens, num_heads, head_dim), dtype=q_tHD.dtype)
        args = _Args(
            q_tHD.data_ptr(),
            k_tGD.data_ptr(),
            v_tGD.data_ptr(),
            out_tHD.data_ptr(),
            pages.data_ptr(),
            cache.v_NBGD.data_ptr(),
            batch.query_start_s1.data_ptr(),
            batch.kv_len_s.data_ptr(),
            batch.block_ids_sb.data_ptr(),
            batch.slot_t.data_ptr() if same else None,
            q_tHD.stride()[:2],
            k_tGD.stride()[:2],
            v_tGD.stride()[:2],
            num_tokens,
            len(batch.kv_len_s),
            batch.block_ids_sb.shape[1],
            num_heads,
            pages.shape[2],
            head_dim,
            pages.shape[1],
            _DTYPES[q_tHD.dtype],
            _DTYPES[pages.dtype],
            rule.window or 0,
            torch.get_num_threads(),
            rule.scale * cache.k_scale,
            cache.v_scale,
            rule.softcap or 0.0,
        )
        self._kernel(ctypes.byref(args))
        return out_tHD
