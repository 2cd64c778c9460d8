"""Who is next, and who is spared. A policy answers each question with a sortable value."""

import heapq
from collections.abc import Iterator
from typing import Protocol

from scheduler.request import Request

Key = tuple[float, ...]


class Policy(Protocol):
    def waiting_key(self, request: Request) -> Key:
        """The smallest is admitted next. Must not change while the request waits."""

    def victim_key(self, request: Request) -> Key:
        """Among the running, the largest is preempted first."""


class Fcfs:
    """First come, first served; who was interrupted is served before all who never ran."""

    def waiting_key(self, request: Request) -> Key:
        if request.requeue_index:
            return (request.requeue_index,)
        if request.is_continuation:
            return (0, 0, request.arrival_seconds, request.submit_index)
        return (0, 1, request.submit_index)

    def victim_key(self, request: Request) -> Key:
        return (request.admission_index,)


class Priority:
    """The most urgent first, then the longest here. Smaller numbers are more urgent."""

    def __init__(self, *, resume_first: bool) -> None:
        """`resume_first`: among equals, who has run before goes before who has not."""
        self._resume_first = resume_first

    def waiting_key(self, request: Request) -> Key:
        has_run = self._resume_first and request.was_interrupted
        return (request.priority, not has_run, request.arrival_seconds, request.submit_index)

    def victim_key(self, request: Request) -> Key:
        return (request.priority, request.arrival_seconds, request.submit_index)


_Entry = tuple[Key, int, Request]


class WaitingQueue:
    """The waiting requests in the order of a policy. O(log n) in and out, also from the middle."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        # Entries of requests that left from the middle stay in the heap until they surface:
        # an entry is live if its number is the one the request was last pushed with.
        self._heap: list[_Entry] = []
        self._live: dict[str, int] = {}
        self._pushes = 0
        self.num_tokens = 0
        """Known tokens of all waiting requests; the owner adds those that arrive meanwhile."""
        self.num_interrupted = 0
        """How many of them have run before."""

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._live

    def __iter__(self) -> Iterator[Request]:
        """In order, lazily. The queue must not change meanwhile."""
        heap = self._heap.copy()
        while heap:
            entry = heapq.heappop(heap)
            if self._is_live(entry):
                yield entry[-1]

    def peek(self) -> Request:
        """The next request; raises IndexError if none waits."""
        while not self._is_live(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][-1]

    def push(self, request: Request) -> None:
        self._pushes += 1
        self._live[request.request_id] = self._pushes
        heapq.heappush(self._heap, (self._policy.waiting_key(request), self._pushes, request))
        self.num_tokens += request.num_tokens
        self.num_interrupted += request.was_interrupted

    def remove(self, request: Request) -> None:
        """Raises KeyError if the request does not wait."""
        del self._live[request.request_id]
        self.num_tokens -= request.num_tokens
        self.num_interrupted -= request.was_interrupted
        if len(self._heap) > 2 * len(self._live) + 64:
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapq.heapify(self._heap)

    def _is_live(self, entry: _Entry) -> bool:
        _, number, request = entry
        return self._live.get(request.request_id) == number
