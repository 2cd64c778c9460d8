"""Tensor-parallel ranks as threads of one process, so that shards can be tested as a whole."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from worker.models.base import Communicator

T = TypeVar("T")


class _Meeting:
    """Where the ranks of a group put their tensors and take those of all."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._slots: list[Tensor | None] = [None] * size
        self._barrier = threading.Barrier(size, timeout=30)

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        self._slots[rank] = x
        self._barrier.wait()
        everyone = [slot.clone() for slot in self._slots if slot is not None]
        self._barrier.wait()
        return everyone

    def abort(self) -> None:
        self._barrier.abort()


class ThreadCommunicator:
    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self.rank = rank
        self.size = meeting.size
        self._meeting = meeting

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self._meeting.exchange(self.rank, x)).sum(0)

    def all_gather_last_dim(self, x: Tensor) -> Tensor:
        return torch.cat(self._meeting.exchange(self.rank, x), -1)


def run_ranks(size: int, run: Callable[[Communicator], T]) -> list[T]:
    """What `run` returns on each rank; raises what the first failing rank raises."""
    meeting = _Meeting(size)

    def guarded(rank: int) -> T:
        try:
            return run(ThreadCommunicator(rank, meeting))
        except BaseException:
            meeting.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        futures = [threads.submit(guarded, rank) for rank in range(size)]
    failures = [error for future in futures if (error := future.exception()) is not None]
    for failure in failures:
        if not isinstance(failure, threading.BrokenBarrierError):
            raise failure
    return [future.result() for future in futures]
