"""Supervisor to workers: forming a group, and what each rank brings into it."""

from scheduler.messages.base import Message


class JoinGroup(Message, frozen=True):
    """Form a group with the other ranks, for one epoch; the one before is over."""

    epoch: int
    rank: int
    host: str
    """The address of this rank at which the others reach it, and at no other."""
    store_host: str
    store_port: int
    """Where rank 0 listens, so that all can find each other."""
    store_prefix: str
    """Of all keys in that store, so that nothing of another epoch can be found there."""


class WorkerHello(Message, frozen=True):
    """What a rank brings into its group."""

    epoch: int
    rank: int
    num_blocks: int
    """Blocks of KV cache, with the null block: what fits on every rank of the group."""
    block_bytes: int
    """On this rank."""
    model_digest: str
    """The same on all ranks that read the same model."""
    vocab_size: int
    max_model_len: int
    """The context length, in tokens: the configured one, or else the model's own."""
