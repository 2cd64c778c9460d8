"""Which worker holds what: ranks, pipeline stages, layers and heads.

A group of TP x PP workers is numbered stage by stage: rank = pp_stage * TP + tp_rank.
"""

from dataclasses import dataclass

from configs.errors import ConfigError, one_of
from configs.sections import ParallelConfig


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where a rank stands in its group."""

    pp_stage: int
    tp_rank: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model that a group of workers has to divide."""

    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    mlp_size: int


def world_size(parallel: ParallelConfig) -> int:
    """Workers in one group."""
    return parallel.tensor_parallel_size * parallel.pipeline_parallel_size


def place_of_rank(parallel: ParallelConfig, rank: int) -> RankPlace:
    """Raises IndexError unless 0 <= rank < world size."""
    if not 0 <= rank < world_size(parallel):
        raise IndexError(f"rank {rank} of a group of {world_size(parallel)}")
    return RankPlace(*divmod(rank, parallel.tensor_parallel_size))


def rank_at(parallel: ParallelConfig, place: RankPlace) -> int:
    """The inverse of `place_of_rank`; raises IndexError for a place outside the group."""
    if not 0 <= place.pp_stage < parallel.pipeline_parallel_size:
        raise IndexError(f"stage {place.pp_stage} of {parallel.pipeline_parallel_size}")
    if not 0 <= place.tp_rank < parallel.tensor_parallel_size:
        raise IndexError(f"rank {place.tp_rank} of {parallel.tensor_parallel_size} in a stage")
    return place.pp_stage * parallel.tensor_parallel_size + place.tp_rank


def layers_of_stage(num_layers: int, num_stages: int, stage: int) -> range:
    """The layers of a stage, spread as evenly as possible: 5 over 2 is 3 + 2.

    The earlier stages get one more when it does not come out even: the last one also has the
    output projection to compute.
    """
    even, num_larger = divmod(num_layers, num_stages)
    first = stage * even + min(stage, num_larger)
    return range(first, first + even + (stage < num_larger))


def attention_heads_of_rank(num_heads: int, tp_size: int, tp_rank: int) -> range:
    """The query heads of a tensor-parallel rank; `tp_size` must divide `num_heads`."""
    per_rank = num_heads // tp_size
    return range(tp_rank * per_rank, (tp_rank + 1) * per_rank)


def kv_heads_of_rank(num_kv_heads: int, tp_size: int, tp_rank: int) -> range:
    """The KV heads of a tensor-parallel rank.

    With more ranks than heads each head is held by `kv_head_copies` consecutive ranks, the ones
    whose query heads read it.
    """
    if tp_size <= num_kv_heads:
        return attention_heads_of_rank(num_kv_heads, tp_size, tp_rank)
    head = tp_rank * num_kv_heads // tp_size
    return range(head, head + 1)


def kv_head_copies(num_kv_heads: int, tp_size: int) -> int:
    """How many ranks hold the same KV head, and so how often the KV cache is kept."""
    return max(1, tp_size // num_kv_heads)


def check_divides(parallel: ParallelConfig, shape: ModelShape) -> None:
    """Raises ConfigError, naming the sizes that would work, if the model cannot be divided."""
    tp_size, num_stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    if not _tp_divides(tp_size, shape):
        works = [
            size for size in range(1, shape.num_attention_heads + 1) if _tp_divides(size, shape)
        ]
        raise ConfigError(
            f"parallel.tensor_parallel_size is {tp_size}, which does not divide this model "
            f"({shape.num_attention_heads} attention heads, {shape.num_kv_heads} KV heads, MLP of "
            f"{shape.mlp_size}): set it to {one_of(works)}."
        )
    if num_stages > shape.num_layers:
        raise ConfigError(
            f"parallel.pipeline_parallel_size is {num_stages}, but the model has only "
            f"{shape.num_layers} layers: set it to {shape.num_layers} or less."
        )


def _tp_divides(tp_size: int, shape: ModelShape) -> bool:
    kv_heads_divide = shape.num_kv_heads % tp_size == 0 or tp_size % shape.num_kv_heads == 0
    return (
        shape.num_attention_heads % tp_size == 0
        and shape.mlp_size % tp_size == 0
        and kv_heads_divide
    )
