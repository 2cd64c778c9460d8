"""The scheduler's link to a worker in the same process."""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from scheduler.messages import Heartbeat, StepPlan, StepResult, WorkerMessage


class StepWorker(Protocol):
    """Whoever executes plans: a model, or something that stands for one."""

    def execute(self, plan: StepPlan) -> StepResult | None: ...


@dataclass
class LocalLink:
    """Executes each plan as it is published, and answers after `step_seconds`."""

    worker: StepWorker
    epoch: int = 0
    step_seconds: float = 0.0
    num_steps: int = 0
    on_plan: Callable[[StepPlan], None] = lambda plan: None
    """Called on the thread that plans, which owns the core."""
    _answers: deque[tuple[float, WorkerMessage]] = field(default_factory=deque)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _woken: bool = False

    def __post_init__(self) -> None:
        self._answers.append((0.0, Heartbeat(self.epoch, 0, 0)))

    @property
    def address(self) -> str:
        return "in this process"

    def open(self) -> "LocalLink":
        return self

    def publish(self, plan: StepPlan) -> None:
        self.num_steps += 1
        self.on_plan(plan)
        result = self.worker.execute(plan)
        assert result is not None
        due_seconds = time.monotonic() + self.step_seconds
        with self._changed:
            if self._answers:
                due_seconds = max(due_seconds, self._answers[-1][0] + self.step_seconds)
            self._answers.append((due_seconds, result))
            self._changed.notify()

    def receive(self, timeout_seconds: float) -> list[WorkerMessage]:
        until = time.monotonic() + timeout_seconds
        with self._changed:
            while not self._woken:
                now = time.monotonic()
                due = []
                while self._answers and self._answers[0][0] <= now:
                    due.append(self._answers.popleft()[1])
                if due or now >= until:
                    return due
                next_due = self._answers[0][0] if self._answers else until
                self._changed.wait(min(next_due, until) - now)
            self._woken = False
            return []

    def wake(self) -> None:
        with self._changed:
            self._woken = True
            self._changed.notify()

    def close(self) -> None:
        pass
