"""Size, rounding and limits of the KV cache."""

import logging

import pytest
import torch

from worker.device import MemoryGrant, grant_on_cpu
from worker.errors import CacheTooSmallError, DeviceError
from worker.kv_cache import (
    FP8,
    CacheSize,
    KVCache,
    block_bytes,
    cache_dtype,
    quantized,
    store,
)
from worker.models.base import ModelSpec

SPEC = ModelSpec(
    architecture="LlamaForCausalLM",
    dtype=torch.float32,
    num_layers=3,
    first_layer=0,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    hidden_size=32,
    vocab_size=100,
    max_position=512,
    windows=(None, None, None),
    is_first_stage=True,
    is_last_stage=True,
    weight_bytes=0,
    digest="",
)
CPU = torch.device("cpu")


def test_bytes_of_a_block_are_those_of_the_memory() -> None:
    for dtype in (torch.float32, torch.bfloat16, FP8):
        cache = KVCache(SPEC, size=CacheSize(5, 4), dtype=dtype, device=CPU)
        held = sum(layer.k_NBGD.nbytes + layer.v_NBGD.nbytes for layer in cache.layers)
        assert held == 5 * block_bytes(SPEC, 4, dtype)


def test_a_cache_starts_as_zeros() -> None:
    cache = KVCache(SPEC, size=CacheSize(5, 4), dtype=torch.bfloat16, device=CPU)
    assert all(not layer.k_NBGD.any() and not layer.v_NBGD.any() for layer in cache.layers)


def test_fp8_saturates_and_uses_its_scale() -> None:
    x = torch.tensor([0.0, 1.0, -1.0, 448.0, 1e6, -1e6])
    assert quantized(x, FP8, 1.0).float().tolist() == [0, 1, -1, 448, 448, -448]
    assert quantized(x, FP8, 4000.0).float().tolist()[4] == pytest.approx(250, rel=0.07)


def test_fp8_is_off_by_a_sixteenth_at_most() -> None:
    """Between the smallest value with all four bits, 2^-6, and the largest, 448."""
    x = torch.logspace(-6, 8.8, 1000, base=2)
    for scale in (1.0, 0.01, 30.0):
        read = quantized(x * scale, FP8, scale).float() * scale
        assert ((read - x * scale).abs() <= x * scale / 16 * 1.0001).all()


def test_fp8_stores_what_it_rounds() -> None:
    cache = KVCache(
        SPEC, size=CacheSize(5, 4), dtype=FP8, device=CPU, k_scale=0.5, v_scale=2.0
    ).layers[1]
    k = torch.linspace(-3, 3, 3 * 16).view(3, 2, 8)
    slots = torch.tensor([19, 4, 6])
    store(cache, slots, k, -k)
    assert torch.equal(cache.k_NBGD.view(-1, 2, 8)[slots].float(), (k / 0.5).to(FP8).float())
    assert torch.equal(cache.v_NBGD.view(-1, 2, 8)[slots].float(), (-k / 2.0).to(FP8).float())


def test_scales_belong_to_fp8() -> None:
    with pytest.raises(ValueError, match="float8"):
        KVCache(SPEC, size=CacheSize(5, 4), dtype=torch.float32, device=CPU, k_scale=2.0)


def test_names_of_dtypes() -> None:
    assert cache_dtype("auto", torch.bfloat16) == torch.bfloat16
    assert cache_dtype("fp8_e4m3", torch.bfloat16) == FP8
    with pytest.raises(DeviceError, match="int4"):
        cache_dtype("int4", torch.bfloat16)


def test_too_little_memory_names_the_largest_length_that_fits() -> None:
    CacheSize(33, 16).require(512, granted="x")
    with pytest.raises(CacheTooSmallError) as raised:
        CacheSize(32, 16).require(512, granted="cache.kv_cache_memory of 1.00 GiB")
    assert str(raised.value) == (
        "cache.kv_cache_memory of 1.00 GiB gives 31 KV blocks of 16 tokens, but one sequence of "
        "max_model_len 512 needs 32: set max_model_len to at most 496, or grant more memory"
    )


def test_memory_that_is_not_there_is_refused() -> None:
    assert isinstance(grant_on_cpu(1 << 20), MemoryGrant)
    with pytest.raises(CacheTooSmallError, match=r"asks for 1048576\.00 GiB .* are free: lower it"):
        grant_on_cpu(1 << 50)


def test_one_line_tells_the_size(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "worker.kv_cache"):
        CacheSize(1025, 16).log(4096, 1 << 20)
    assert [record.getMessage() for record in caplog.records] == [
        "KV cache: 1025 blocks of 16 tokens (1.00 GiB on this rank), 16384 tokens in all, "
        "4.00 sequences of 4096 tokens at once"
    ]
