"""What a request has taken, and what it went through."""

from enum import StrEnum

from scheduler.messages.base import Message


class InterruptionCause(StrEnum):
    """Why a running request lost its blocks."""

    BLOCKS = "blocks"
    """The pool ran dry."""
    SLOTS = "slots"
    """A strictly more urgent request took its place among `max_num_seqs`."""
    WORKER_LOST = "worker_lost"
    SCHEDULER_LOST = "scheduler_lost"
    RESIZE = "resize"
    DRAIN = "drain"


class Interruptions(Message, frozen=True):
    """What a request went through so far: its preemptions and what they cost."""

    causes: dict[InterruptionCause, int]
    recovered_tokens: int = 0
    recomputed_tokens: int = 0
    stalled_seconds: float = 0.0

    @property
    def count(self) -> int:
        return sum(self.causes.values())


class Usage(Message, frozen=True):
    """Tokens of one request. `cached_tokens` is the prefix hit of its first admission."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    interruptions: Interruptions | None = None
    """None: never interrupted."""
