"""What a test may not leave behind: processes, and files in shared memory.

Sockets of links and memory of groups have no names in any file system: they end with the last
process that has them open.
"""

import contextlib
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

_PATIENCE_SECONDS = 15.0

# Inherited by all that tests start, also by what outlives its parent.
RUN_VARIABLE = "PALIMPSEST_TEST_RUN"
"""Marks the processes of one test run, of all its workers; set at its beginning."""
_WORKER_VARIABLE = "PALIMPSEST_TEST_WORKER"
_THIS_WORKER = os.environ[_WORKER_VARIABLE] = secrets.token_hex(8)


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What is there at one moment, as far as it can be ours."""

    processes: frozenset[str]
    """Of this worker of the test run, as `pid name`."""
    shared_memory: frozenset[str]

    @classmethod
    def now(cls) -> "Leftovers":
        ours = _processes_with(_WORKER_VARIABLE, _THIS_WORKER)
        return cls(
            processes=frozenset(f"{process.pid} {_name_of(process)}" for process in ours),
            shared_memory=frozenset(path.name for path in Path("/dev/shm").iterdir()),
        )

    def new_since(self, before: "Leftovers") -> dict[str, list[str]]:
        """Of each kind what has come up since `before` and is still there."""
        found = {
            "processes": self.processes - before.processes,
            "shared memory": self.shared_memory - before.shared_memory,
        }
        return {kind: sorted(names) for kind, names in found.items() if names}


def assert_nothing_left(before: Leftovers) -> None:
    """Wait until everything that came up since `before` is gone; fails with what is not."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while left := Leftovers.now().new_since(before):
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.1)


def wait_for_run_to_end() -> list[str]:
    """What of the whole run is still there after a while, as `pid command`."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while (left := _others_of_run()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def _others_of_run() -> list[str]:
    """Without this process, and helpers of Python itself that end with it."""
    found = []
    for process in _processes_with(RUN_VARIABLE, os.environ[RUN_VARIABLE]):
        try:
            command = " ".join(process.cmdline())
            is_helper = process.ppid() == os.getpid() and "multiprocessing" in command
        except psutil.Error:
            continue  # it has just ended
        if process.pid != os.getpid() and not is_helper:
            found.append(f"{process.pid} {command[:200]}")
    return found


def _processes_with(variable: str, value: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has just ended, or is somebody else's
            if process.environ().get(variable) == value:
                found.append(process)
    return found


def _name_of(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.Error:
        return "?"
