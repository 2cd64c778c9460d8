"""Ids that have ended, remembered for a while: calls may be repeated and overtake each other."""

from typing import NamedTuple

from scheduler.messages import EndRequest

TOMBSTONE_SECONDS = 60.0


class _Tombstone(NamedTuple):
    ended_seconds: float
    client_id: str | None
    """Whose request it was; None: its end came first."""
    early_end: EndRequest | None


class Tombstones:
    """Constant time per call but `forget_client`, and as large as a minute's ends."""

    def __init__(self) -> None:
        # In the order of time.
        self._ended: dict[str, _Tombstone] = {}

    def __len__(self) -> int:
        return len(self._ended)

    def __contains__(self, request_id: str) -> bool:
        """It ended a short while ago, or its end has come before it."""
        return request_id in self._ended

    def early_end(self, request_id: str) -> EndRequest | None:
        """The end that overtook the submission of `request_id`, if one did."""
        found = self._ended.get(request_id)
        return None if found is None else found.early_end

    def remember(self, request_id: str, now: float, client_id: str) -> None:
        """A request of `client_id` has ended."""
        self._ended.pop(request_id, None)
        self._ended[request_id] = _Tombstone(now, client_id, None)

    def remember_early(self, end: EndRequest, now: float) -> None:
        """The end of a request that is not known yet."""
        self._ended[end.request_id] = _Tombstone(now, None, end)

    def forget_client(self, client_id: str) -> None:
        """All that a client had may come again: it may never have heard of its end."""
        for request_id in [r for r, t in self._ended.items() if t.client_id == client_id]:
            del self._ended[request_id]

    def expire(self, now: float) -> None:
        """Forget the ids that ended too long ago to matter."""
        while self._ended:
            request_id, tombstone = next(iter(self._ended.items()))
            if tombstone.ended_seconds >= now - TOMBSTONE_SECONDS:
                break
            del self._ended[request_id]
