"""Plans to the workers and results back by Ray calls, where only Ray's own ports are open.

Ten times slower than ZeroMQ. Both ends talk to a mailbox actor. Ray may reorder the calls of
one caller, so every message carries its number on its way, and the mailbox puts them in order.
"""

import asyncio
import contextlib
import itertools
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import ray

from scheduler.errors import LinkError
from scheduler.messages import (
    StepPlan,
    WorkerMessage,
    decode,
    decode_worker_message,
    encode,
)

T = TypeVar("T")

_SCHEDULER = "scheduler"
_WAIT_SECONDS = 1.0
_JOIN_SECONDS = 5.0


class LinkMailbox:
    """Holds what was sent until the receiver has said that it arrived."""

    def __init__(self) -> None:
        self._arrived: defaultdict[str, deque[bytes]] = defaultdict(deque)
        self._first_number: defaultdict[str, int] = defaultdict(int)
        self._early: dict[tuple[str, str, int], bytes] = {}
        self._next_number: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._news: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    async def put(self, sender: str, receiver: str, number: int, data: bytes) -> None:
        """Message `number`, from 0 on, on the way from `sender` to `receiver`."""
        way = sender, receiver
        self._early[*way, number] = data
        while (data_due := self._early.pop((*way, self._next_number[way]), None)) is not None:
            self._arrived[receiver].append(data_due)
            self._next_number[way] += 1
            self._news[receiver].set()

    async def get(self, receiver: str, first: int) -> list[bytes]:
        """What has arrived from message `first` on, counted per receiver; waits a second for it.

        Messages before `first` are forgotten.
        """
        arrived = self._arrived[receiver]
        while arrived and self._first_number[receiver] < first:
            arrived.popleft()
            self._first_number[receiver] += 1
        if not arrived:
            news = self._news[receiver]
            news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_WAIT_SECONDS):
                    await news.wait()
        return list(arrived)


def start_mailbox() -> Any:
    """A mailbox for one epoch. It dies with its owner, or by `ray.kill`."""
    return ray.remote(LinkMailbox).options(num_cpus=0, max_restarts=0).remote()


@dataclass(frozen=True, slots=True)
class RayPlanLinkOffer:
    mailbox: Any
    num_ranks: int

    def open(self) -> "RayPlanLink":
        return RayPlanLink(self)


@dataclass(frozen=True, slots=True)
class RayWorkerLinkOffer:
    mailbox: Any
    rank: int

    def open(self) -> "RayWorkerLink":
        return RayWorkerLink(self)


class RayPlanLink:
    """The scheduler's end: a `scheduler.ports.PlanLink`."""

    address = "mailbox"

    def __init__(self, offer: RayPlanLinkOffer) -> None:
        self._end = _End(offer.mailbox, _SCHEDULER, decode_worker_message)
        self._ranks = [_name_of(rank) for rank in range(offer.num_ranks)]

    def publish(self, plan: StepPlan) -> None:
        data = encode(plan)
        for name in self._ranks:
            self._end.send(name, data)

    def receive(self, timeout_seconds: float) -> list[WorkerMessage]:
        self._end.wait(timeout_seconds)
        return self._end.take()

    def wake(self) -> None:
        self._end.wake()

    def close(self) -> None:
        self._end.close()


class RayWorkerLink:
    """A rank's end: a `worker.ports.WorkerLink`."""

    def __init__(self, offer: RayWorkerLinkOffer) -> None:
        self._end = _End(offer.mailbox, _name_of(offer.rank), _decode_plan)

    def receive(self, timeout_seconds: float) -> StepPlan | None:
        self._end.wait(timeout_seconds)
        plans = self._end.take(1)
        return plans[0] if plans else None

    def send(self, message: WorkerMessage) -> None:
        self._end.send(_SCHEDULER, encode(message))

    def wake(self) -> None:
        self._end.wake()

    def close(self) -> None:
        self._end.close()


class _End(Generic[T]):
    """One end: a thread that fetches, and a queue of what it fetched."""

    def __init__(self, mailbox: Any, name: str, decode_message: Callable[[bytes], T]) -> None:
        self._mailbox = mailbox
        self._name = name
        self._decode = decode_message
        self._numbers: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)
        self._last_put: Any = None
        self._messages: deque[T] = deque()
        self._changed = threading.Condition()
        self._woken = False
        self._closed = False
        self._error = ""
        self._fetcher = threading.Thread(target=self._fetch, name="ray-link", daemon=True)
        self._fetcher.start()

    def send(self, receiver: str, data: bytes) -> None:
        if self._error:
            raise LinkError(self._error)
        number = next(self._numbers[receiver])
        self._last_put = self._mailbox.put.remote(self._name, receiver, number, data)

    def wait(self, timeout_seconds: float) -> None:
        """Raises LinkError when the mailbox is gone."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._messages or self._woken or self._error, timeout_seconds
            )
            self._woken = False
        if self._error and not self._messages:
            raise LinkError(self._error)

    def take(self, at_most: int | None = None) -> list[T]:
        count = len(self._messages) if at_most is None else min(at_most, len(self._messages))
        return [self._messages.popleft() for _ in range(count)]

    def wake(self) -> None:
        with self._changed:
            self._woken = True
            self._changed.notify()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._fetcher.join(_JOIN_SECONDS)
        # The last message may be the one that says why this end closes.
        with contextlib.suppress(ray.exceptions.RayError):
            if self._last_put is not None:
                ray.get(self._last_put, timeout=_WAIT_SECONDS)

    def _fetch(self) -> None:
        first = 0
        try:
            while not self._closed:
                fetched = ray.get(self._mailbox.get.remote(self._name, first))
                first += len(fetched)
                messages = [self._decode(data) for data in fetched]
                if messages:
                    with self._changed:
                        self._messages.extend(messages)
                        self._changed.notify()
        except Exception as error:
            with self._changed:
                self._error = f"the mailbox of the link cannot be used: {error}"
                self._changed.notify()


def _name_of(rank: int) -> str:
    return f"rank-{rank}"


def _decode_plan(data: bytes) -> StepPlan:
    return decode(data, StepPlan)
