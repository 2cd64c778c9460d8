"""Actors for the question what Ray cancels together with a task."""

import asyncio
from typing import Any

from cluster.engine_calls import call_of_its_own


class Listener:
    """Says what it was told, and holds back an answer until it is wanted."""

    def __init__(self) -> None:
        self._told: list[str] = []
        self._may_answer = asyncio.Event()

    async def late(self, text: str) -> str:
        await self._may_answer.wait()
        return text

    async def answer_now(self) -> None:
        self._may_answer.set()

    async def tell(self, text: str) -> None:
        self._told.append(text)

    async def told(self) -> list[str]:
        return self._told


class Caller:
    """Its tasks make calls, and then wait to be cancelled."""

    def __init__(self, listener: Any) -> None:
        self._listener = listener
        self._has_called = asyncio.Event()
        self._calls: list[Any] = []

    async def call(self, texts: list[Any]) -> None:
        """`texts` holds one to come, for which the calls wait here, as they do in a busy
        process."""
        (text,) = texts
        self._calls = [
            self._listener.tell.remote(text),
            call_of_its_own(self._listener.tell, text),
        ]
        self._has_called.set()
        await asyncio.Event().wait()

    async def has_called(self) -> None:
        await self._has_called.wait()

    async def results(self) -> list[str]:
        """What became of the calls."""
        outcomes = await asyncio.gather(*self._calls, return_exceptions=True)
        return [type(outcome).__name__ for outcome in outcomes]
