"""Rank arithmetic, and what is said about a model that cannot be divided."""

from itertools import chain, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs import ConfigError, ParallelConfig
from configs.ranks import (
    ModelShape,
    RankPlace,
    attention_heads_of_rank,
    check_divides,
    kv_head_copies,
    kv_heads_of_rank,
    layers_of_stage,
    place_of_rank,
    rank_at,
    world_size,
)

SMOLLM2 = ModelShape(num_layers=30, num_attention_heads=9, num_kv_heads=3, mlp_size=1536)


def parallel(tp: int, pp: int) -> ParallelConfig:
    return ParallelConfig(tensor_parallel_size=tp, pipeline_parallel_size=pp)


def test_ranks_are_numbered_stage_by_stage() -> None:
    group = parallel(tp=3, pp=2)
    assert world_size(group) == 6
    assert [place_of_rank(group, rank) for rank in range(6)] == [
        RankPlace(0, 0),
        RankPlace(0, 1),
        RankPlace(0, 2),
        RankPlace(1, 0),
        RankPlace(1, 1),
        RankPlace(1, 2),
    ]


@given(st.integers(1, 16), st.integers(1, 16))
def test_place_and_rank_are_inverse(tp: int, pp: int) -> None:
    group = parallel(tp, pp)
    assert [rank_at(group, place_of_rank(group, rank)) for rank in range(tp * pp)] == list(
        range(tp * pp)
    )


def test_places_outside_the_group_are_errors() -> None:
    group = parallel(tp=3, pp=2)
    for rank in (-1, 6):
        with pytest.raises(IndexError):
            place_of_rank(group, rank)
    for place in (RankPlace(2, 0), RankPlace(0, 3), RankPlace(-1, 0), RankPlace(0, -1)):
        with pytest.raises(IndexError):
            rank_at(group, place)


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "sizes"),
    [(5, 2, [3, 2]), (30, 3, [10, 10, 10]), (11, 3, [4, 4, 3]), (4, 4, [1, 1, 1, 1])],
)
def test_layers_are_spread_evenly(num_layers: int, num_stages: int, sizes: list[int]) -> None:
    stages = [layers_of_stage(num_layers, num_stages, stage) for stage in range(num_stages)]
    assert [len(stage) for stage in stages] == sizes


@given(st.integers(1, 64), st.data())
def test_each_layer_has_one_stage(num_layers: int, data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, num_layers))
    stages = [layers_of_stage(num_layers, num_stages, stage) for stage in range(num_stages)]
    assert list(chain.from_iterable(stages)) == list(range(num_layers))
    assert all(len(a) - len(b) in (0, 1) for a, b in pairwise(stages))
    assert len(stages[0]) - len(stages[-1]) <= 1


@given(st.integers(1, 8), st.integers(1, 8), st.data())
def test_each_rank_holds_the_kv_heads_of_its_query_heads(
    num_kv_heads: int, group_size: int, data: st.DataObject
) -> None:
    num_heads = num_kv_heads * group_size
    shape = ModelShape(1, num_heads, num_kv_heads, mlp_size=num_heads)
    tp = data.draw(st.sampled_from([n for n in range(1, num_heads + 1) if _divides(n, shape)]))
    holders: dict[int, int] = {}
    for rank in range(tp):
        needed = {head // group_size for head in attention_heads_of_rank(num_heads, tp, rank)}
        held = kv_heads_of_rank(num_kv_heads, tp, rank)
        assert set(held) == needed
        for head in held:
            holders[head] = holders.get(head, 0) + 1
    assert holders == dict.fromkeys(range(num_kv_heads), kv_head_copies(num_kv_heads, tp))


def _divides(tp: int, shape: ModelShape) -> bool:
    try:
        check_divides(parallel(tp, 1), shape)
    except ConfigError:
        return False
    return True


def test_sizes_that_divide_a_model() -> None:
    assert [tp for tp in range(1, 20) if _divides(tp, SMOLLM2)] == [1, 3]
    replicated = ModelShape(32, num_attention_heads=32, num_kv_heads=8, mlp_size=14336)
    assert [tp for tp in range(1, 65) if _divides(tp, replicated)] == [1, 2, 4, 8, 16, 32]


def test_a_size_that_does_not_divide_is_told_with_those_that_do() -> None:
    with pytest.raises(ConfigError) as caught:
        check_divides(parallel(tp=2, pp=1), SMOLLM2)
    assert str(caught.value) == (
        "parallel.tensor_parallel_size is 2, which does not divide this model (9 attention heads, "
        "3 KV heads, MLP of 1536): set it to 1 or 3."
    )


def test_more_stages_than_layers_are_told() -> None:
    check_divides(parallel(tp=1, pp=30), SMOLLM2)
    with pytest.raises(ConfigError) as caught:
        check_divides(parallel(tp=1, pp=31), SMOLLM2)
    assert str(caught.value) == (
        "parallel.pipeline_parallel_size is 31, but the model has only 30 layers: set it to 30 or "
        "less."
    )
