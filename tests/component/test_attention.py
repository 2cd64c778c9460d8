"""One conformance suite for every attention backend, against the definition in float64."""

import itertools
from functools import cache

import pytest
import torch

from tests.support.attention import Case, Piece, make_case
from worker.attention.base import AttentionBackend, AttentionRule
from worker.attention.cpu import CpuAttention
from worker.attention.reference import ReferenceAttention
from worker.kv_cache import FP8

BACKENDS = ["reference", "cpu"]


@cache
def backend_named(name: str) -> AttentionBackend:
    return CpuAttention() if name == "cpu" else ReferenceAttention()


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    return backend_named(request.param)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Of model and cache: CPUs with matrix units compute prompts in bfloat16 another way."""
    return request.param


# Of values of order 1, as the output is rounded: float32 keeps 24 bits, float16 11, bfloat16 8.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
# Of a cache against one that rounds nothing: float8 keeps 4 bits of each key and value.
ROUNDED_TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, FP8: 0.25}

MIXED = (
    Piece(1, 1),
    Piece(5, 5),
    Piece(16, 16),
    Piece(17, 1),
    Piece(33, 2),
    Piece(300, 1),
    Piece(140, 60),
    Piece(48, 16),
    Piece(700, 1),
)


def check(backend: AttentionBackend, case: Case, rule: AttentionRule | None = None) -> None:
    rule = rule or AttentionRule(case.q_tHD.shape[-1] ** -0.5)
    expected = case.expected(rule)
    found = backend.attend(case.q_tHD, case.k_tGD, case.v_tGD, case.cache, case.batch, rule)
    assert found.dtype == case.q_tHD.dtype
    assert found.shape == case.q_tHD.shape
    difference = (found.cpu().double() - expected).abs().max()
    assert difference <= TOLERANCE[found.dtype], float(difference)


@pytest.mark.parametrize("heads", [(4, 4), (9, 3), (8, 2), (8, 1)], ids=str)
def test_group_sizes(backend: AttentionBackend, heads: tuple[int, int], dtype: torch.dtype) -> None:
    num_heads, num_kv_heads = heads
    case = make_case(
        MIXED, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=64, dtype=dtype
    )
    check(backend, case)


@pytest.mark.parametrize("head_dim", [8, 20, 48, 64, 80, 128, 256])
def test_head_dimensions(backend: AttentionBackend, head_dim: int, dtype: torch.dtype) -> None:
    pieces = (*MIXED, Piece(600, 70))
    check(backend, make_case(pieces, num_heads=3, num_kv_heads=1, head_dim=head_dim, dtype=dtype))


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float32, FP8),
        (torch.bfloat16, FP8),
        (torch.float16, FP8),
    ],
    ids=str,
)
def test_dtypes_of_model_and_cache(
    backend: AttentionBackend, dtype: torch.dtype, cache_dtype: torch.dtype
) -> None:
    case = make_case(
        MIXED, num_heads=6, num_kv_heads=2, head_dim=32, dtype=dtype, cache_dtype=cache_dtype
    )
    check(backend, case)


def test_scales_of_fp8(backend: AttentionBackend) -> None:
    """Values that fp8 alone could not hold: K up to about 4 x 150, V down to 4 / 500."""
    case = make_case(
        MIXED,
        num_heads=6,
        num_kv_heads=2,
        head_dim=32,
        cache_dtype=FP8,
        scales=(2.0, 0.002),
    )
    case.k_tGD = case.k_tGD * 150
    case.v_tGD = case.v_tGD / 500
    check(backend, case, AttentionRule(32**-0.5 / 150))


@pytest.mark.parametrize("cache_dtype", ROUNDED_TOLERANCE, ids=str)
def test_what_a_rounded_cache_loses(backend: AttentionBackend, cache_dtype: torch.dtype) -> None:
    exact, rounded = (
        make_case(MIXED, num_heads=6, num_kv_heads=2, head_dim=32, cache_dtype=dtype)
        for dtype in (torch.float32, cache_dtype)
    )
    rule = AttentionRule(32**-0.5)
    found = backend.attend(
        rounded.q_tHD, rounded.k_tGD, rounded.v_tGD, rounded.cache, rounded.batch, rule
    )
    difference = (found.double() - exact.expected(rule)).abs().max()
    assert difference <= ROUNDED_TOLERANCE[cache_dtype], float(difference)


@pytest.mark.parametrize("block_size", [1, 3, 16, 32, 100])
def test_block_sizes(backend: AttentionBackend, block_size: int, dtype: torch.dtype) -> None:
    case = make_case(
        MIXED, num_heads=4, num_kv_heads=2, head_dim=32, block_size=block_size, dtype=dtype
    )
    check(backend, case)


@pytest.mark.parametrize("window", [1, 5, 16, 100, 5000])
def test_sliding_windows(backend: AttentionBackend, window: int, dtype: torch.dtype) -> None:
    case = make_case(MIXED, num_heads=4, num_kv_heads=2, head_dim=32, dtype=dtype)
    check(backend, case, AttentionRule(32**-0.5, window=window))


def test_softcap_and_scale(backend: AttentionBackend, dtype: torch.dtype) -> None:
    case = make_case(MIXED, num_heads=4, num_kv_heads=2, head_dim=32, dtype=dtype)
    check(backend, case, AttentionRule(0.7, softcap=3.0))
    check(backend, case, AttentionRule(0.7, window=9, softcap=50.0))


def test_a_prefix_that_another_sequence_writes_in_the_same_plan(backend: AttentionBackend) -> None:
    """Two identical prompts admitted in one step: the second reads what the first one writes."""
    first = Piece(37, 37)
    case = make_case([first, Piece(37, 5)], num_heads=4, num_kv_heads=2, head_dim=32, seed=3)
    # The second table begins with the first's two full blocks, which are not computed yet.
    case.tables[1][:2] = case.tables[0][:2]
    case.batch.block_ids_sb[1, :2] = case.tables[0][:2]
    check(backend, case)


@pytest.mark.parametrize("block_size", [1, 16, 100])
@pytest.mark.parametrize("tiled", [False, None])
def test_long_stretches_of_prompts(block_size: int, tiled: bool | None) -> None:
    """With whole prompts among them, later parts of one, and decodes."""
    pieces = (Piece(128, 128), Piece(17, 1), Piece(500, 150), Piece(40, 20), Piece(131, 130))
    backend = CpuAttention(tiled=tiled)
    for dtype in (torch.bfloat16, torch.float32):
        case = make_case(
            pieces, num_heads=6, num_kv_heads=2, head_dim=32, block_size=block_size, dtype=dtype
        )
        check(backend, case)
        check(backend, case, AttentionRule(0.3, window=60))
        check(backend, case, AttentionRule(0.3, softcap=3.0))


@pytest.mark.parametrize("num_queries", [1, 3, 50, 200])
def test_the_result_is_the_same_alone_and_in_a_batch(
    backend: AttentionBackend, num_queries: int
) -> None:
    pieces = [Piece(1300, num_queries), *MIXED]
    case = make_case(pieces, num_heads=6, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    rule = AttentionRule(64**-0.5)
    batch = backend.attend(case.q_tHD, case.k_tGD, case.v_tGD, case.cache, case.batch, rule)
    alone = make_case(pieces, num_heads=6, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    part = slice(0, num_queries)
    alone.batch = type(alone.batch)(
        alone.batch.query_start_s1[:2],
        alone.batch.kv_len_s[:1],
        alone.batch.block_ids_sb[:1],
        alone.batch.slot_t[part],
        num_queries,
        1300,
    )
    found = backend.attend(
        alone.q_tHD[part], alone.k_tGD[part], alone.v_tGD[part], alone.cache, alone.batch, rule
    )
    assert torch.equal(found, batch[part])


def test_threads_do_not_change_the_bits(dtype: torch.dtype) -> None:
    backend = backend_named("cpu")
    results = []
    for num_threads in (1, 2, 3):
        case = make_case(MIXED, num_heads=6, num_kv_heads=2, head_dim=64, dtype=dtype)
        torch.set_num_threads(num_threads)
        try:
            results.append(
                backend.attend(
                    case.q_tHD, case.k_tGD, case.v_tGD, case.cache, case.batch, AttentionRule(0.125)
                )
            )
        finally:
            torch.set_num_threads(1)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_only_the_new_slots_are_written(backend: AttentionBackend) -> None:
    case = make_case(MIXED, num_heads=4, num_kv_heads=2, head_dim=32)
    before = case.cache.k_NBGD.clone(), case.cache.v_NBGD.clone()
    check(backend, case)
    for pages, old, new in zip(
        (case.cache.k_NBGD, case.cache.v_NBGD), before, (case.k_tGD, case.v_tGD), strict=True
    ):
        old.flatten(0, 1)[case.batch.slot_t] = new
        assert torch.equal(pages, old)


LENGTHS = (1, 2, 15, 16, 17, 127, 128, 129, 511, 512, 513, 1000, 2000)


@pytest.mark.full
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("window", [None, 60])
def test_every_length_and_chunk(
    backend: AttentionBackend, dtype: torch.dtype, group: int, window: int | None
) -> None:
    """Lengths around block, chunk and span edges, ending in chunks on and off those edges."""
    pieces = [
        Piece(length, min(length, chunk))
        for length, chunk in itertools.product(LENGTHS, (1, 7, 16))
    ]
    case = make_case(
        pieces, num_heads=2 * group, num_kv_heads=2, head_dim=32, dtype=dtype, seed=group
    )
    check(backend, case, AttentionRule(32**-0.5, window=window))
