"""The wish for another shape: who may have one, and what becomes of it.

    taken ─► checked ─► carried out by the engine ─► it stands, or the old shape is restored

At most one at a time. No Ray: the engine asks for what is wanted, and says what came of it.
"""

import asyncio
import contextlib
from collections.abc import Iterator

from cluster.errors import ResizeError
from cluster.shape import Shape
from scheduler.messages import EngineInfo, EngineState

_RESIZABLE = (EngineState.READY, EngineState.RECOVERING)


class ResizeDesk:
    """All calls are for one event loop."""

    def __init__(self) -> None:
        self._taken: Shape | None = None
        self._wanted: Shape | None = None
        self._changed = asyncio.Event()
        self._outcome: asyncio.Future[None] | None = None
        self._failure = ""
        self._end_reason = ""
        """Why the engine is over."""

    @property
    def wanted(self) -> Shape | None:
        """The shape to go to, as long as that has neither succeeded nor failed."""
        return self._wanted

    @contextlib.contextmanager
    def taken(self, shape: Shape, info: EngineInfo) -> Iterator[None]:
        """Whoever wants `shape` has the desk for himself; raises ResizeError if he cannot."""
        if self._taken is not None:
            raise ResizeError(
                f"a resize to {self._taken} is under way; try again when it is done, which "
                f"`palimpsest status` tells"
            )
        if info.state not in _RESIZABLE:
            reason = f" ({info.reason})" if info.reason else ""
            raise ResizeError(
                f"the engine is {info.state}{reason}, and only one that is ready or recovering "
                f"can be resized"
            )
        self._taken = shape
        try:
            yield
        finally:
            self._taken = None

    async def carry_out(self, shape: Shape) -> None:
        """Let the engine go to `shape`; returns when it stands. For who has the desk.

        Raises ResizeError with the reason when the old shape was restored instead, or the engine
        is over.
        """
        if self._end_reason:
            raise self._over()
        self._wanted, self._failure = shape, ""
        self._outcome = asyncio.get_running_loop().create_future()
        self._changed.set()
        try:
            await self._outcome
        finally:
            self._wanted = None

    async def until_wanted(self) -> Shape:
        while self._wanted is None:
            self._changed.clear()
            await self._changed.wait()
        return self._wanted

    # -- what became of it, as the engine knows it ------------------------------------------

    def failed(self, reason: str) -> None:
        """The wanted shape did not come up. Who wants it is told when another one stands."""
        self._wanted, self._failure = None, f"{self._taken} did not come up: {reason}"

    def stands(self, shape: Shape) -> None:
        """A group of `shape` has formed."""
        if self._outcome is None or self._outcome.done():
            return
        if self._failure:
            self._end(ResizeError(f"{self._failure}. {shape} was restored"))
        elif shape == self._wanted:
            self._wanted = None
            self._outcome.set_result(None)

    def close(self, reason: str) -> None:
        """The engine is over."""
        self._end_reason = reason
        self._end(self._over())

    def _over(self) -> ResizeError:
        failure = f"{self._failure}; and then " if self._failure else ""
        return ResizeError(f"{failure}the engine ended: {self._end_reason}")

    def _end(self, error: ResizeError) -> None:
        self._wanted = None
        if self._outcome is not None and not self._outcome.done():
            self._outcome.set_exception(error)
