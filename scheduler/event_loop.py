"""From the thread of the step loop to an event loop."""

import asyncio
from collections.abc import Mapping

from scheduler.errors import CoreCrashedError
from scheduler.messages import TokenBatch
from scheduler.step_loop import GroupLoss, Listener, Load


class OnEventLoop:
    """A Listener that tells another one, on the event loop of that one."""

    def __init__(self, listener: Listener, event_loop: asyncio.AbstractEventLoop) -> None:
        self._listener = listener
        self._call = event_loop.call_soon_threadsafe

    def on_joined(self, epoch: int) -> None:
        self._call(self._listener.on_joined, epoch)

    def on_news(self, batches: Mapping[str, TokenBatch], load: Load) -> None:
        self._call(self._listener.on_news, batches, load)

    def on_lost(self, loss: GroupLoss) -> None:
        self._call(self._listener.on_lost, loss)

    def on_crash(self, crash: CoreCrashedError) -> None:
        self._call(self._listener.on_crash, crash)
