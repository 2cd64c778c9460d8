"""A worker group in plain processes on this machine, without Ray.

For tests, benchmarks and single machines: starts one process per rank, sends each of them the
plans in order, and hands back the results. A rank that fails or dies breaks the group.
"""

import contextlib
import logging
import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Self

import torch.distributed as dist

from configs import ResolvedConfig
from configs.ranks import world_size
from scheduler.messages import StepPlan, StepResult, decode, encode
from worker.distributed import Meeting
from worker.errors import GroupBrokenError
from worker.rank import Rank, RankReport

logger = logging.getLogger(__name__)

_EXIT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class _Join:
    epoch: int
    shared_memory: bool
    deadline_seconds: float


@dataclass(frozen=True, slots=True)
class _Fault:
    kind: str
    message: str


class ProcessGroup:
    """All ranks of one group. Use it as a context manager: leaving ends every process."""

    def __init__(
        self,
        config: ResolvedConfig,
        directory: Path,
        *,
        device: str = "cpu",
        num_threads: int = 1,
        shared_memory: bool = True,
        start_seconds: float = 600.0,
        deadline_seconds: float = 60.0,
    ) -> None:
        """Start the processes, load the model in `directory` and join epoch 0.

        `num_threads` is per rank. Raises GroupBrokenError with what a rank said.
        """
        self._size = world_size(config.parallel)
        self._shared_memory = shared_memory
        self._deadline_seconds = deadline_seconds
        self._start_seconds = start_seconds
        # Every process imports torch; a server that has done so can be forked instead.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["worker.rank"])
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self.reports: tuple[RankReport, ...] = ()
        try:
            for rank in range(self._size):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_run_rank,
                    args=(theirs, config, rank, device, num_threads, directory, self._store.port),
                    name=f"rank{rank}",
                    daemon=True,
                )
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(ours)
            self.join(0)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def num_blocks(self) -> int:
        return self.reports[0].num_blocks

    def join(self, epoch: int) -> None:
        """Let all ranks form a new group under `epoch`."""
        self._epoch = epoch
        self._send_all(_Join(epoch, self._shared_memory, self._deadline_seconds))
        reports: dict[int, RankReport] = {}
        while len(reports) < self._size:
            report = self._next(self._start_seconds)
            if isinstance(report, RankReport):
                reports[report.rank] = report
        self.reports = tuple(reports[rank] for rank in range(self._size))

    def submit(self, plan: StepPlan) -> None:
        """Send a plan to all ranks; does not wait for it."""
        self._send_all(encode(plan))

    def result(self) -> StepResult:
        """The result of the oldest plan not yet answered. Raises GroupBrokenError."""
        while True:
            said = self._next(self._deadline_seconds)
            if isinstance(said, bytes):
                return decode(said, StepResult)

    def kill(self, rank: int) -> None:
        """End a rank as a machine failure would."""
        self._processes[rank].kill()

    def close(self) -> None:
        """End all processes; those that do not go by themselves are killed."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(_EXIT_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()
        self._pipes, self._processes = [], []

    def _send_all(self, message: object) -> None:
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send(message)
            except OSError as error:
                raise GroupBrokenError(f"rank {rank} is gone") from error

    def _next(self, timeout_seconds: float) -> object:
        """What some rank says next."""
        ready = wait(self._pipes, timeout_seconds)
        if not ready:
            raise GroupBrokenError(f"no rank said anything for {timeout_seconds:g} s")
        pipe = ready[0]
        assert isinstance(pipe, Connection)
        rank = self._pipes.index(pipe)
        try:
            said: object = pipe.recv()
        except (EOFError, OSError) as error:
            raise GroupBrokenError(f"rank {rank} died") from error
        if isinstance(said, _Fault):
            raise GroupBrokenError(f"rank {rank}: {said.kind}: {said.message}")
        return said


def _run_rank(
    pipe: Connection,
    config: ResolvedConfig,
    rank: int,
    device: str,
    num_threads: int,
    directory: Path,
    store_port: int,
) -> None:
    """The life of one process: load, then joins and plans until the pipe closes."""
    try:
        worker = Rank(config, rank, device=device, device_index=rank, num_threads=num_threads)
        worker.load(directory)
        store = dist.TCPStore("127.0.0.1", store_port, is_master=False)
        for message in _messages(pipe):
            if isinstance(message, _Join):
                meeting = Meeting(
                    dist.PrefixStore(f"epoch{message.epoch}", store),
                    deadline_seconds=message.deadline_seconds,
                    shared_memory=message.shared_memory,
                )
                pipe.send(worker.join(message.epoch, meeting))
            elif isinstance(message, bytes):
                result = worker.execute(decode(message, StepPlan))
                if result is not None:
                    pipe.send(encode(result))
        worker.leave()
    except Exception as error:
        logger.debug("rank %d failed", rank, exc_info=True)
        with contextlib.suppress(OSError):
            pipe.send(_Fault(type(error).__name__, str(error)))


def _messages(pipe: Connection) -> Iterator[object]:
    with contextlib.suppress(EOFError, OSError):
        while True:
            yield pipe.recv()
