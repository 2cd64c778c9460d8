"""Faults under load: requests that never stop coming, and processes that die under them."""

import contextlib
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import psutil
import pytest

from cluster.supervisor_view import AppStatus, Recovery
from scheduler.messages import EngineState
from tests.support.asking import Answered, Job, ask_all
from tests.support.serving import App

RECOVERY_SECONDS = 90.0
MAX_LOGPROB_ERROR = 1e-3
_ANSWER_SECONDS = 90.0
_DEAD_SECONDS = 30.0
_TICK_SECONDS = 0.02
_STEPS_OF_A_START = 80
"""In so many each request that was in flight at two deaths in a row, which makes it a suspect, has
been computed alone and got a token. Faults that hit earlier would prove it guilty."""


@dataclass
class Load:
    """The same jobs again and again, all at once; each answer must be the expected one."""

    app: App
    jobs: Sequence[Job]
    expected: Sequence[Answered]
    num_answers: int = 0
    num_comments: int = 0
    """That kept streams alive which stood still."""
    causes: Counter[str] = field(default_factory=Counter)
    """Why they were interrupted, over all answers."""

    def of_first(self, num_jobs: int) -> "Load":
        """A smaller one."""
        return Load(self.app, self.jobs[:num_jobs], self.expected[:num_jobs])

    def run_once(self) -> None:
        answers = ask_all(self.app.url, list(self.jobs))
        for job, answer, expected in zip(self.jobs, answers, self.expected, strict=True):
            assert answer.content == expected.content, job
            ratings = pytest.approx(expected.token_logprobs, abs=MAX_LOGPROB_ERROR)
            assert answer.token_logprobs == ratings, job
            self.num_comments += answer.num_comments
            self.causes.update(answer.preemption.get("causes", {}))
        self.num_answers += len(answers)

    def wait_for_answers(self, count: int = 1) -> None:
        """Returns when so many more have come; it must be running."""
        wanted, deadline = self.num_answers + count, time.monotonic() + _ANSWER_SECONDS
        while self.num_answers < wanted:
            assert time.monotonic() < deadline, "nothing is answered any more"
            time.sleep(0.05)

    def wait_busy(self) -> None:
        """Returns when most jobs are in the middle of their answers; it must be running."""
        deadline = time.monotonic() + _ANSWER_SECONDS
        while self.app.status().info.running_requests <= len(self.jobs) // 2:
            assert time.monotonic() < deadline, "nothing runs any more"
            time.sleep(_TICK_SECONDS)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """In a thread, for as long as the body takes, and then to the end of the round. Raises
        what went wrong there."""
        stopping = threading.Event()
        errors: list[BaseException] = []

        def run() -> None:
            try:
                while not stopping.is_set():
                    self.run_once()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            stopping.set()
            thread.join()
            if errors:  # of which what the body raised is but a consequence
                raise errors[0]


def undisturbed(app: App, jobs: Sequence[Job]) -> Load:
    """The jobs with the answers that they get when nothing happens."""
    answers = ask_all(app.url, list(jobs))
    assert not any(answer.preemption for answer in answers)
    return Load(app, jobs, answers)


def kill(pid: int) -> None:
    """Nothing happens if somebody else was faster."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # gone before it was opened, or read
        return False


def wait_dead(pids: Iterable[int]) -> None:
    deadline = time.monotonic() + _DEAD_SECONDS
    while alive := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, f"still alive: {alive}"
        time.sleep(0.05)


def wait_recovered(app: App, num_recoveries: int) -> Recovery:
    """The last recovery, once there were so many and the engine is ready."""
    deadline = time.monotonic() + RECOVERY_SECONDS
    status: AppStatus | None = None
    while time.monotonic() < deadline:
        status = app.status()
        if status.num_recoveries >= num_recoveries and status.info.state is EngineState.READY:
            return status.recoveries[-1]
        assert status.info.state is not EngineState.FAILED, status.info
        time.sleep(_TICK_SECONDS)
    raise AssertionError(f"not recovered after {RECOVERY_SECONDS} s: {status}")


def wait_steady(app: App, epoch: int) -> AppStatus:
    """The status once a group of a later epoch than `epoch` has done some steps."""
    deadline = time.monotonic() + RECOVERY_SECONDS
    status: AppStatus | None = None
    while time.monotonic() < deadline:
        status = app.status()
        info, scheduler = status.info, status.scheduler
        assert info.state is not EngineState.FAILED, info
        if info.is_ready and info.epoch > epoch and scheduler is not None:
            counters = scheduler.counters
            if counters is not None and counters.next_step_id >= _STEPS_OF_A_START:
                return status
        time.sleep(_TICK_SECONDS)
    raise AssertionError(f"no steps after {RECOVERY_SECONDS} s: {status}")


def pids_of(title: str) -> list[int]:
    """Of the processes of this test whose titles begin so, in no order."""
    pids = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if " ".join(process.cmdline()).startswith(title):
                pids.append(process.pid)
    return pids


def replica_pids(app: App) -> list[int]:
    """Of its ingress replicas."""
    return pids_of(f"ray::ServeReplica:{app.name}:")
