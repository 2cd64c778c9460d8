"""How much of the queue one API key may fill, so that its owner cannot lock the others out."""

from dataclasses import dataclass

from cluster.api_errors import TooManyRequestsError


@dataclass(slots=True)
class _Waiting:
    num_requests: int = 0
    num_tokens: int = 0


class QueueShare:
    """Counts the requests of each key that have no token yet, in this replica."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        """What one key may have waiting. A key with nothing waiting may make any one call."""
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._by_key: dict[int, _Waiting] = {}

    def enter(self, key: int, num_requests: int, num_tokens: int) -> "Place":
        """Raises TooManyRequestsError if the key's share is taken."""
        waiting = self._by_key.setdefault(key, _Waiting())
        if waiting.num_requests:
            self._check("requests", waiting.num_requests, num_requests, self._max_requests)
            self._check("tokens", waiting.num_tokens, num_tokens, self._max_tokens)
        waiting.num_requests += num_requests
        waiting.num_tokens += num_tokens
        return Place(waiting, num_requests, num_tokens)

    def _check(self, what: str, waiting: int, more: int, limit: int) -> None:
        if waiting + more > limit:
            raise TooManyRequestsError(
                f"This API key has {waiting} {what} waiting and asks for {more} more; one key may "
                f"have {limit}, half of the queue. Try again later.",
                code="queue_share_full",
                retry_after_seconds=1,
            )


class Place:
    """What one call takes of its key's share, until it is left."""

    def __init__(self, waiting: _Waiting, num_requests: int, num_tokens: int) -> None:
        self._waiting = waiting
        self._num_requests = num_requests
        self._num_tokens = num_tokens

    def leave(self) -> None:
        """Safe to call again."""
        self._waiting.num_requests -= self._num_requests
        self._waiting.num_tokens -= self._num_tokens
        self._num_requests = self._num_tokens = 0
