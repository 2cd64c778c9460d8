"""What a test may not leave behind: processes, and files in shared memory.

Sockets of links and memory of groups have no names in any file system: they end with the last
process that has them open.
"""

import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

_PATIENCE_SECONDS = 15.0
# Inherited by all that a test run starts, also by what outlives its parent.
_MARK, _OF_THIS_RUN = "TEST_RUN", secrets.token_hex(8)
os.environ[_MARK] = _OF_THIS_RUN


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What is there at one moment, as far as it can be ours."""

    processes: frozenset[str]
    """Of this test run, as `pid name`."""
    shared_memory: frozenset[str]

    @classmethod
    def now(cls) -> "Leftovers":
        ours = [process for process in psutil.process_iter() if _is_of_this_run(process)]
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


def _is_of_this_run(process: psutil.Process) -> bool:
    try:
        return bool(process.environ().get(_MARK) == _OF_THIS_RUN)
    except psutil.Error:  # gone, or somebody else's
        return False


def _name_of(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.Error:
        return "?"
