"""What one ingress replica has not acknowledged yet."""

from scheduler.messages import TokenBatch


class Outbox:
    """Batches for one client: numbered from 1 on, and kept until it says that they arrived.

        put ──► pending ──► given, as number n ──► gone
                       take                 take(n)

    There is at most one batch underway, because a client has one poll at a time; what comes
    meanwhile is collected, so a slow client gets fewer and larger batches.
    """

    __slots__ = ("_given", "_number", "_pending")

    def __init__(self) -> None:
        self._number = 0
        self._given: tuple[TokenBatch, ...] = ()
        self._pending: list[TokenBatch] = []

    @property
    def is_empty(self) -> bool:
        """Everything has arrived, and the client has said so."""
        return not (self._given or self._pending)

    def put(self, batch: TokenBatch) -> None:
        self._pending.append(batch)

    def take(self, last_batch: int) -> tuple[int, tuple[TokenBatch, ...]]:
        """The batch after `last_batch`, with its number: the same one until that is named.

        (`last_batch`, ()) if there is none.
        """
        if last_batch >= self._number:
            self._given = ()
        if not self._given and self._pending:
            self._number += 1
            self._given = tuple(self._pending)
            self._pending.clear()
        return (self._number if self._given else last_batch), self._given
