"""The ingress replicas of a scheduler: what each has still to get, and whether it is there."""

import asyncio
import contextlib
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from scheduler.messages import TokenBatch
from scheduler.outbox import Outbox

POLL_SECONDS = 5.0
"""How long a poll waits for news."""
CLIENT_LOST_SECONDS = 15.0
"""A replica that has not polled for so long is gone."""
_STANDSTILL_SECONDS = 4.0


@dataclass(slots=True)
class Client:
    """One ingress replica. Lives on an event loop."""

    last_seen_seconds: float
    has_resumed: bool = False
    """It has brought what it had under an earlier scheduler, and may poll."""
    outbox: Outbox = field(default_factory=Outbox)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    num_polls: int = 0

    async def take(self, last_batch: int) -> tuple[int, tuple[TokenBatch, ...]]:
        """See `Outbox.take`; waits for news for some seconds.

        A newer call lets the older one return without news.
        """
        self.num_polls += 1
        this_poll = self.num_polls
        self.news.set()  # an older poll that is still waiting goes home
        number, batches = self.outbox.take(last_batch)
        if not batches and this_poll > 1:  # the first one is to learn the state at once
            self.news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS):
                    await self.news.wait()
            self.last_seen_seconds = time.monotonic()
            if self.num_polls == this_poll:
                number, batches = self.outbox.take(last_batch)
        return number, batches


class Clients:
    """All replicas that a scheduler has heard of."""

    def __init__(self) -> None:
        self._clients: dict[str, Client] = {}
        self._awaited: set[str] = set()
        self._muted: set[str] = set()
        self._looked_seconds = 0.0
        self.all_resumed = asyncio.Event()
        """Whoever was awaited has resumed, or is no longer awaited."""

    def __contains__(self, client_id: object) -> bool:
        return client_id in self._clients

    def see(self, client_id: str) -> Client:
        """The replica, which is there at this moment."""
        client = self._clients.get(client_id)
        if client is None:
            client = self._clients[client_id] = Client(time.monotonic())
        client.last_seen_seconds = time.monotonic()
        return client

    def put(self, batches: Mapping[str, TokenBatch]) -> None:
        for client_id, batch in batches.items():
            client = self._clients.get(client_id)
            if client is not None and client_id not in self._muted:
                client.outbox.put(batch)
                client.news.set()

    def wake(self) -> None:
        """Let all polls return."""
        for client in self._clients.values():
            client.news.set()

    @property
    def have_everything(self) -> bool:
        """All that was put has arrived."""
        return all(client.outbox.is_empty for client in self._clients.values())

    # -- from one scheduler to the next ---------------------------------------------------

    def wait_for(self, client_ids: Collection[str]) -> None:
        """Expect these to resume what they had."""
        self._awaited = {c for c in client_ids if not self.see(c).has_resumed}
        self._check_awaited()

    def resumed(self, client_id: str) -> None:
        self.see(client_id).has_resumed = True
        self._awaited.discard(client_id)
        self._check_awaited()

    def wait_no_longer(self) -> None:
        """With new requests. What the others have may still come, until they are lost."""
        self.all_resumed.set()

    @property
    def are_all_here(self) -> bool:
        """Whoever was awaited has resumed, or is gone."""
        return not self._awaited

    def _check_awaited(self) -> None:
        if not self._awaited:
            self.all_resumed.set()

    # -- the end --------------------------------------------------------------------------

    def lost(self, now: float) -> list[str]:
        """Who has not polled for long. Ask every second: where more time has passed since the last
        call, it was this process that stood still, and nobody is lost."""
        stood_still = now - self._looked_seconds > _STANDSTILL_SECONDS
        self._looked_seconds = now
        if stood_still:
            for client in self._clients.values():
                client.last_seen_seconds = now
        return [
            client_id
            for client_id, client in self._clients.items()
            if now - client.last_seen_seconds > CLIENT_LOST_SECONDS
        ]

    def mute(self, client_id: str) -> None:
        """Drop what is still on its way to a client that was forgotten, until `unmute`: it may
        come back before that, and bring the same requests again."""
        self._muted.add(client_id)

    def unmute(self, client_id: str) -> None:
        self._muted.discard(client_id)

    def forget(self, client_id: str) -> None:
        client = self._clients.pop(client_id, None)
        if client is not None:
            client.news.set()
        self._awaited.discard(client_id)
        self._check_awaited()
