"""What can be done to an application on purpose, as the HTTP side knows it."""

from dataclasses import dataclass
from typing import Protocol

from cluster.chaos_schedule import Action
from cluster.supervisor_view import AppStatus


class UnknownProcessError(Exception):
    """The application has no process of this name; the message says which it has."""


@dataclass(frozen=True, slots=True)
class Struck:
    """What was done. Seconds are those of `time.time` on the machine of the process."""

    process_id: int
    struck_seconds: float


class Operations(Protocol):
    """What chaos needs of an application. Raises EngineUnavailableError when nobody answers."""

    async def status(self) -> AppStatus: ...

    async def strike(self, process: str, action: Action, seconds: float) -> Struck:
        """Kill a process, or stop it for `seconds` and let it go on; `process` is a name as in
        `AppStatus.processes`. Returns when that is done. Raises UnknownProcessError."""
        ...
