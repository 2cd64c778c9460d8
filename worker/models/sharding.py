"""Which part of a model a rank holds: layers by stage, heads and MLP columns by tensor rank."""

from dataclasses import dataclass

from worker.models.errors import UnsupportedSplit


def layer_range(num_layers: int, stage: int, num_stages: int) -> range:
    """The layers of one pipeline stage, spread evenly; earlier stages take the remainder.

    Raises UnsupportedSplit where a stage would be empty.
    """
    if num_stages > num_layers:
        raise UnsupportedSplit(
            f"The model has {num_layers} layers, which cannot fill {num_stages} pipeline stages; "
            f"use pipeline_parallel_size <= {num_layers}."
        )
    each, more = divmod(num_layers, num_stages)
    start = stage * each + min(stage, more)
    return range(start, start + each + (stage < more))


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """One tensor-parallel rank's part of the heads, the MLP and the vocabulary.

    Ranges are half-open and count whole heads, MLP columns and token ids. Where ranks
    outnumber KV heads, `kv_heads` is one head that neighbouring ranks hold as well.
    """

    rank: int
    size: int
    heads: range
    kv_heads: range
    mlp: range
    vocab: range
    """Padded: the last ids may lie beyond the vocabulary."""
    kv_copies: int
    """How many ranks hold the same KV head."""


def _part(total: int, rank: int, size: int) -> range:
    each = total // size
    return range(rank * each, (rank + 1) * each)


def tensor_slice(
    *,
    rank: int,
    size: int,
    num_heads: int,
    num_kv_heads: int,
    intermediate_size: int,
    vocab_size: int,
) -> TensorSlice:
    """The slice of `rank` among `size`; raises UnsupportedSplit with the sizes that work."""
    if not _divides(size, num_heads, num_kv_heads, intermediate_size):
        fitting = [
            str(n)
            for n in range(1, num_heads + 1)
            if _divides(n, num_heads, num_kv_heads, intermediate_size)
        ]
        raise UnsupportedSplit(
            f"tensor_parallel_size {size} does not divide {num_heads} heads, {num_kv_heads} KV "
            f"heads and MLP width {intermediate_size}; this model allows {', '.join(fitting)}."
        )
    padded_vocab = -(-vocab_size // size) * size
    if size <= num_kv_heads:
        kv_heads = _part(num_kv_heads, rank, size)
    else:
        head = rank * num_kv_heads // size
        kv_heads = range(head, head + 1)
    return TensorSlice(
        rank=rank,
        size=size,
        heads=_part(num_heads, rank, size),
        kv_heads=kv_heads,
        mlp=_part(intermediate_size, rank, size),
        vocab=_part(padded_vocab, rank, size),
        kv_copies=max(1, size // num_kv_heads),
    )


def _divides(size: int, num_heads: int, num_kv_heads: int, intermediate_size: int) -> bool:
    kv_fits = num_kv_heads % size == 0 or size % num_kv_heads == 0
    return kv_fits and num_heads % size == 0 and intermediate_size % size == 0
