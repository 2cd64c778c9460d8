"""Ids that have ended, remembered for a while: calls may be repeated and overtake each other."""

from scheduler.messages import EndRequest

TOMBSTONE_SECONDS = 60.0


class Tombstones:
    """Constant time per call, and as large as a minute's ends."""

    def __init__(self) -> None:
        # In the order of time. An end without a request came before its submission.
        self._ended: dict[str, tuple[float, EndRequest | None]] = {}

    def __len__(self) -> int:
        return len(self._ended)

    def __contains__(self, request_id: str) -> bool:
        """It ended a short while ago, or its end has come before it."""
        return request_id in self._ended

    def early_end(self, request_id: str) -> EndRequest | None:
        """The end that overtook the submission of `request_id`, if one did."""
        _, end = self._ended.get(request_id, (0.0, None))
        return end

    def remember(self, request_id: str, now: float, early_end: EndRequest | None = None) -> None:
        self._ended.pop(request_id, None)
        self._ended[request_id] = (now, early_end)

    def forget(self, request_id: str) -> None:
        self._ended.pop(request_id, None)

    def expire(self, now: float) -> None:
        """Forget the ids that ended too long ago to matter."""
        while self._ended:
            request_id, (ended_seconds, _) = next(iter(self._ended.items()))
            if ended_seconds >= now - TOMBSTONE_SECONDS:
                break
            del self._ended[request_id]
