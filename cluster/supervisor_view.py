"""What a supervisor tells: of its engine to the ingress, and of all it has to people."""

from dataclasses import dataclass
from typing import Any

from cluster.shape import Shape
from scheduler.messages import EngineInfo
from scheduler.status import SchedulerStatus


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process runs."""

    node_id: str
    host: str
    """The address of the machine that other machines reach it under."""
    process_id: int


@dataclass(frozen=True, slots=True)
class ReplicaActor:
    """An ingress replica as Ray knows it."""

    name: str
    place: Place


@dataclass(frozen=True, slots=True)
class EngineView:
    """The engine as the supervisor shows it."""

    version: int
    """Rises with every change of the rest."""
    fingerprint: str
    """Of the configuration that holds; another one than yours means that you were replaced."""
    info: EngineInfo
    scheduler: Any
    """The scheduler actor once requests may go there, else None."""
    scheduler_id: str
    """Of that one; another one's is another."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """How an engine came back, step by step. Times are of `time.time`."""

    epoch: int
    """The one that began."""
    reason: str
    replaced: tuple[str, ...]
    """Processes that are new in it: `worker 2`, `scheduler`."""
    noticed_seconds: float
    left_seconds: float
    """Everybody had left the old group, or was ended."""
    loaded_seconds: float
    """The model was in the memory of all workers."""
    joined_seconds: float
    """All were there, and steps began."""


@dataclass(frozen=True, slots=True)
class AppStatus:
    """For people: what runs, and where."""

    app: str
    model: str
    info: EngineInfo
    shape: Shape | None
    """Of the last group that formed, or of the first one to come."""
    num_replicas: int
    """Ingress replicas that hold the lease."""
    scheduler_place: Place | None
    places: tuple[Place, ...]
    """Of all ranks, in their order."""
    supervisor_place: Place
    replica_places: tuple[Place, ...]
    """Of the ingress replicas, in the order in which they came."""
    scheduler: SchedulerStatus | None
    num_restarts: int
    """Processes that took the place of another."""
    num_recoveries: int
    recoveries: tuple[Recovery, ...]
    """The last ones."""

    @property
    def processes(self) -> dict[str, Place]:
        """All of them, by the names that people call them by."""
        found = {f"worker {rank}": place for rank, place in enumerate(self.places)}
        if self.scheduler_place is not None:
            found["scheduler"] = self.scheduler_place
        found["supervisor"] = self.supervisor_place
        found |= {f"replica {i}": place for i, place in enumerate(self.replica_places)}
        return found
