"""A link to a worker in this process, which runs the fake model."""

import threading
from collections import deque

from scheduler.errors import LinkError
from scheduler.messages import Heartbeat, StepPlan, StepResult, WorkerMessage, decode, encode
from tests.support.fake_worker import Stage


class MemoryLink:
    """Implements `scheduler.ports.PlanLink` and `PlanLinkOffer`.

    The worker answers at once, or when `release` is called if it was made with `hold`.
    """

    address = "memory"

    def __init__(self, num_blocks: int, block_size: int, *, epoch: int, hold: bool = False) -> None:
        self._stage = Stage(0, 1, num_blocks, block_size)
        self._epoch = epoch
        self.hold = hold
        self._answers: deque[WorkerMessage] = deque([Heartbeat(epoch, 0, 0)])
        self._held: deque[WorkerMessage] = deque()
        self._changed = threading.Condition()
        self._woken = False
        self.is_broken = False
        self.is_closed = False
        self.plans: list[StepPlan] = []

    def open(self) -> "MemoryLink":
        return self

    def publish(self, plan: StepPlan) -> None:
        if self.is_broken:
            raise LinkError("worker 0 cannot be reached")
        plan = decode(encode(plan), StepPlan)
        self.plans.append(plan)
        _, outputs = self._stage.execute(plan, None)
        result = StepResult(plan.epoch, plan.step_id, outputs, 0.001, 0.0001)
        (self._held if self.hold else self._answers).append(result)

    def receive(self, timeout_seconds: float) -> list[WorkerMessage]:
        with self._changed:
            self._changed.wait_for(lambda: self._answers or self._woken, timeout_seconds)
            self._woken = False
            received = list(self._answers)
            self._answers.clear()
        return received

    def say(self, message: WorkerMessage) -> None:
        """Let the worker say something. From any thread."""
        with self._changed:
            self._answers.append(message)
            self._changed.notify()

    def release(self, count: int = 1) -> None:
        """Let the worker answer `count` steps that it holds back. From any thread."""
        for _ in range(count):
            self.say(self._held.popleft())

    @property
    def num_held(self) -> int:
        return len(self._held)

    def wake(self) -> None:
        with self._changed:
            self._woken = True
            self._changed.notify()

    def close(self) -> None:
        self.is_closed = True
