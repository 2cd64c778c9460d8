"""What a test may not leave behind: processes, shared memory, sockets."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

_PATIENCE_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What is there at one moment, as far as it can be ours."""

    processes: frozenset[str]
    """Descendants of this process, as `pid name`."""
    shared_memory: frozenset[str]
    link_sockets: frozenset[str]

    @classmethod
    def now(cls) -> "Leftovers":
        children = psutil.Process().children(recursive=True)
        alive = [child for child in children if child.is_running()]
        sockets = Path("/proc/net/unix").read_text().splitlines()
        return cls(
            processes=frozenset(f"{child.pid} {_name_of(child)}" for child in alive),
            shared_memory=frozenset(path.name for path in Path("/dev/shm").iterdir()),
            link_sockets=frozenset(line.split()[-1] for line in sockets if "@palimpsest-" in line),
        )

    def new_since(self, before: "Leftovers") -> dict[str, list[str]]:
        """Of each kind what has come up since `before` and is still there."""
        found = {
            "processes": self.processes - before.processes,
            "shared memory": self.shared_memory - before.shared_memory,
            "link sockets": self.link_sockets - before.link_sockets,
        }
        return {kind: sorted(names) for kind, names in found.items() if names}


def assert_nothing_left(before: Leftovers) -> None:
    """Wait until everything that came up since `before` is gone; fails with what is not."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while left := Leftovers.now().new_since(before):
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.1)


def processes_of_run(marker: str) -> list[str]:
    """All other processes that have `marker` in their environment, as `pid command`.

    Without helpers of Python's own that this process has started, and that end with it.
    """
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or marker not in process.environ().values():
                continue
            command = " ".join(process.cmdline())
            is_helper = process.ppid() == os.getpid() and "multiprocessing" in command
        except psutil.Error:
            continue  # it has just ended, or is a zombie
        if not is_helper:
            found.append(f"{process.pid} {command[:200]}")
    return found


def wait_for_run_to_end(marker: str) -> list[str]:
    """What of it is still there after a while."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while (left := processes_of_run(marker)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def _name_of(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.Error:
        return "?"
