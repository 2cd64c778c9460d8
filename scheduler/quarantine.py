"""Requests that may be what kills the workers, and how that is found out.

    deaths in a row, without a token of the request in between
    0 ── 1 ── 2: suspect, computed alone from now on ── dies alone once ── dies alone twice: ended

A request counts a death when its work was in flight. One token of it and it is innocent.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from scheduler.request import Request

DEATHS_OF_A_SUSPECT = 2
LONE_DEATHS_OF_A_CULPRIT = 2
VERDICT = "the workers died again and again while they computed this request and no other"


@dataclass(slots=True)
class _Deaths:
    request: Request
    num: int = 0
    num_alone: int = 0


class Quarantine:
    def __init__(self) -> None:
        self._deaths: dict[str, _Deaths] = {}
        """In the order in which they were first hit."""
        self.suspect: Request | None = None
        """Who is to be computed next, and alone. Others wait, whatever their order."""

    def __bool__(self) -> bool:
        """Somebody has counted a death."""
        return bool(self._deaths)

    def died(self, in_flight: Iterable[Request]) -> Request | None:
        """The workers died over the work of these; the culprit, if that proves it."""
        hit = list(in_flight)
        alone = hit[0] if len(hit) == 1 and hit[0] is self.suspect else None
        for request in hit:
            self._deaths.setdefault(request.request_id, _Deaths(request)).num += 1
        culprit = None
        if alone is not None:
            deaths = self._deaths[alone.request_id]
            deaths.num_alone += 1
            if deaths.num_alone >= LONE_DEATHS_OF_A_CULPRIT:
                culprit = alone
        self._choose()
        return culprit

    def clear(self, request: Request) -> None:
        """It has got a token, or has ended."""
        if self._deaths.pop(request.request_id, None) is not None:
            self._choose()

    def _choose(self) -> None:
        suspects = (d.request for d in self._deaths.values() if d.num >= DEATHS_OF_A_SUSPECT)
        self.suspect = next(suspects, None)
