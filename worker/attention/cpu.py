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
        *((name, c_int32) for name in ("window", "tiled", "num_threads")),
        *((name, c_float) for name in ("score_scale", "value_scale", "softcap")),
    )


class CpuAttention:
    """Raises BackendUnavailableError at construction when the kernel cannot be built.

    One thread at a time: what all layers of a batch share is put together once, at the first.
    """

    name = "cpu"

    def __init__(self, *, tiled: bool | None = None) -> None:
        """`tiled`: prompts in bfloat16 on the CPU's matrix units; None: where it has them."""
        library = load("attention")
        self._kernel = library.paged_attention
        self._kernel.argtypes = [ctypes.POINTER(_Args)]
        self._kernel.restype = None
        can_tile = bool(library.attention_has_tiles())
        assert can_tile or not tiled, "no matrix units here"
        self._tiled = can_tile if tiled is None else tiled
        self._batch: AttentionBatch | None = None
        self._args = _Args()

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
        args, pages = self._args, cache.k_NBGD
        if batch is not self._batch:
            self._set_batch(batch)
        same = k_tGD.dtype == v_tGD.dtype == pages.dtype
        if not same:
            store(cache, batch.slot_t, k_tGD, v_tGD)
        out_tHD = torch.empty(q_tHD.shape, dtype=q_tHD.dtype)
        args.q, args.k, args.v = q_tHD.data_ptr(), k_tGD.data_ptr(), v_tGD.data_ptr()
        args.out = out_tHD.data_ptr()
        args.k_pages, args.v_pages = pages.data_ptr(), cache.v_NBGD.data_ptr()
        args.slots = batch.slot_t.data_ptr() if same else None
        args.q_strides = q_tHD.stride()[:2]
        args.k_strides = k_tGD.stride()[:2]
        args.v_strides = v_tGD.stride()[:2]
        args.num_tokens, args.num_heads, args.head_dim = q_tHD.shape
        _, args.block_size, args.num_kv_heads, _ = pages.shape
        args.activation_dtype, args.cache_dtype = _DTYPES[q_tHD.dtype], _DTYPES[pages.dtype]
        args.window = rule.window or 0
        args.score_scale, args.value_scale = rule.scale * cache.k_scale, cache.v_scale
        args.softcap = rule.softcap or 0.0
        args.tiled = self._tiled and q_tHD.dtype == pages.dtype == torch.bfloat16
        self._kernel(ctypes.byref(args))
        return out_tHD

    def _set_batch(self, batch: AttentionBatch) -> None:
        args = self._args
        args.query_start = batch.query_start_s1.data_ptr()
        args.kv_len = batch.kv_len_s.data_ptr()
        args.block_ids = batch.block_ids_sb.data_ptr()
        args.num_seqs, args.blocks_per_seq = batch.block_ids_sb.shape
        args.num_threads = torch.get_num_threads()
        self._batch = batch  # keeps what the pointers point to
