"""Which part of a model a tensor-parallel rank holds: heads, MLP columns, token ids."""

from dataclasses import dataclass

from configs.ranks import (
    ModelShape,
    attention_heads_of_rank,
    check_divides,
    kv_heads_of_rank,
)
from configs.sections import ParallelConfig


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Half-open ranges of whole heads, MLP columns and token ids.

    Where ranks outnumber KV heads, `kv_heads` is one head that neighbouring ranks hold too.
    """

    heads: range
    kv_heads: range
    mlp: range
    vocab: range
    """Padded: the last ids may lie beyond the vocabulary."""


def tensor_slice(
    shape: ModelShape, vocab_size: int, *, rank: int, size: int, num_stages: int
) -> TensorSlice:
    """The slice of tensor rank `rank` among `size`.

    Raises ConfigError, naming the sizes that would work, if the model cannot be divided.
    """
    check_divides(
        ParallelConfig(tensor_parallel_size=size, pipeline_parallel_size=num_stages), shape
    )
    columns = shape.mlp_size // size
    ids = -(-vocab_size // size)
    return TensorSlice(
        heads=attention_heads_of_rank(shape.num_attention_heads, size, rank),
        kv_heads=kv_heads_of_rank(shape.num_kv_heads, size, rank),
        mlp=range(rank * columns, (rank + 1) * columns),
        vocab=range(rank * ids, (rank + 1) * ids),
    )
