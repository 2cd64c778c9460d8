"""The thread that hosts the core: calls and workers' messages in, plans and batches out.

    call ──► mailbox ─┐                          ┌─► link.publish, to every rank
                      ├─► core ── plan, batches ─┤
    link.receive ─────┘                          └─► Listener.on_news, to the ingress replicas

Plans go out before batches: while workers wait nothing is computed. The loop outlives worker
groups: each comes with a link of its own, and between two of them there is none, so that calls
run and no step is planned.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar

from scheduler.core import SchedulerCore
from scheduler.crash import core_crashed
from scheduler.deadline import StepDeadline
from scheduler.errors import (
    CacheInUseError,
    CoreCrashedError,
    GroupLostError,
    LinkError,
    LoopOverError,
)
from scheduler.group import GroupSize
from scheduler.histogram import Histogram
from scheduler.messages import (
    Heartbeat,
    InterruptionCause,
    StepPlan,
    StepResult,
    TokenBatch,
    WorkerFault,
    WorkerMessage,
)
from scheduler.ports import PlanLink

logger = logging.getLogger(__name__)

T = TypeVar("T")
Call: TypeAlias = Callable[[SchedulerCore, float], Any]

_TICK_SECONDS = 1.0
_NUM_EVENTS_TOLD = 64
_NUM_TIMINGS = 4096
_RATE_WINDOW_SECONDS = 1.0

# Errors that a call raises because of what its caller asked for. All others mean that the state
# of the core can no longer be trusted.
_MISTAKES_OF_THE_CALLER = (CacheInUseError,)


@dataclass(frozen=True, slots=True)
class Load:
    """How much there is to do."""

    running_requests: int = 0
    waiting_requests: int = 0
    waiting_tokens: int = 0
    tokens_per_second: float = 0.0
    """Tokens computed in the last seconds in which there was work; 0.0 before the first."""


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Where the time of one step went. `gap_seconds` is as in StepResult."""

    gap_seconds: float
    execute_seconds: float
    apply_seconds: float
    """In the scheduler: from the arrival of the result until it was applied."""
    plan_seconds: float
    """In the scheduler: from there until the plans that it made possible were sent."""


@dataclass(frozen=True, slots=True)
class GroupLoss:
    """The end of a worker group, as far as the scheduler saw it."""

    epoch: int
    reason: str
    num_steps: int
    """Steps of the epoch that were answered."""
    lost_seconds: float
    """By the clock of the machine."""
    found_culprit: bool
    """It proves which request kills the workers, and that has ended."""


class Listener(Protocol):
    """Told what happens, on the thread of the loop; must return soon."""

    def on_joined(self, epoch: int) -> None:
        """All ranks of the group are there, and steps begin."""

    def on_news(self, batches: Mapping[str, TokenBatch], load: Load) -> None:
        """Deltas by client, and a load that differs from the last one."""

    def on_lost(self, loss: GroupLoss) -> None:
        """The group is lost, and all that ran waits for another one."""

    def on_crash(self, crash: CoreCrashedError) -> None:
        """The core raised. Nothing it holds can be trusted, so the process should end."""


class StepLoop:
    """Runs `core` on a thread of its own, from `start` to `stop`."""

    def __init__(
        self,
        core: SchedulerCore,
        *,
        step_deadline_seconds: float,
        first_step_seconds: float,
        listener: Listener,
    ) -> None:
        """See `StepDeadline` for the two limits."""
        self._core = core
        self._new_deadline = partial(
            StepDeadline, step_deadline_seconds, first_seconds=first_step_seconds
        )
        self._listener = listener
        self._link: PlanLink = _NoLink()
        self._has_group = False
        self._missing_ranks: set[int] = set()
        self._deadline = self._new_deadline()
        self._mailbox: deque[tuple[Call, Future[Any]]] = deque()
        self._events: deque[tuple[object, ...]] = deque(maxlen=_NUM_EVENTS_TOLD)
        self._load = Load()
        self._rate = _Rate()
        self._stopping = False
        self.timings: deque[StepTiming] = deque(maxlen=_NUM_TIMINGS)
        self.step_seconds = {
            part: Histogram.of_step_seconds() for part in ("plan", "execute", "apply")
        }
        """Of all steps, by their parts as in StepTiming."""
        self._thread = threading.Thread(target=self._run, name="step-loop", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the loop and close the link. Returns when both is done."""
        self._stopping = True
        self._link.wake()
        self._thread.join()

    def call(self, function: Callable[[SchedulerCore, float], T]) -> "Future[T]":
        """Let the loop run `function(core, now)` between two steps. From any thread.

        The future fails with LoopOverError when the loop is over.
        """
        future: Future[T] = Future()
        self._mailbox.append((function, future))
        if self._stopping:
            self._refuse_calls()
        else:
            self._link.wake()
        return future

    def begin(self, epoch: int, link: PlanLink, size: GroupSize) -> None:
        """Go on under `epoch` with a new group, as soon as its ranks have said that they are there.

        From any thread. The link is the loop's from now on.
        """

        def attach(core: SchedulerCore, now: float) -> None:
            self._lose("another group takes its place")
            core.begin_epoch(epoch, size.num_blocks, size.pipeline)
            self._link = link
            self._has_group = True
            self._missing_ranks = set(range(size.num_ranks))
            self._deadline = self._new_deadline()

        def close_refused(attached: "Future[None]") -> None:
            if attached.exception() is not None:
                link.close()

        self.call(attach).add_done_callback(close_refused)

    def lose(
        self, epoch: int, reason: str, cause: InterruptionCause = InterruptionCause.WORKER_LOST
    ) -> None:
        """Give up the group of `epoch`, because somebody knows that it is lost, or wants another.

        Nothing happens if it was given up already. From any thread.
        """

        def lose(core: SchedulerCore, now: float) -> None:
            if core.group.epoch == epoch:
                self._lose(reason, cause)

        self.call(lose)

    def _run(self) -> None:
        try:
            while not self._stopping:
                try:
                    self._round()
                except (GroupLostError, LinkError) as error:
                    self._lose(str(error))
        except Exception as error:
            logger.exception("the scheduler core failed; last events: %s", list(self._events))
            self._listener.on_crash(core_crashed(error))
        finally:
            self._stopping = True
            self._refuse_calls()
            self._link.close()

    def _round(self) -> None:
        asked_seconds = time.monotonic()
        messages = self._link.receive(_TICK_SECONDS)
        arrived = time.perf_counter()
        result = None
        for message in messages:
            if isinstance(message, StepResult):
                result = message
            self._take(message)
        self._run_calls()
        applied = time.perf_counter()
        if self._has_group and not self._missing_ranks:
            self._publish_plans()
        if result is not None:
            published = time.perf_counter()
            self._note_timing(
                StepTiming(
                    gap_seconds=result.gap_seconds,
                    execute_seconds=result.execute_seconds,
                    apply_seconds=applied - arrived,
                    plan_seconds=published - applied,
                )
            )
        self._report()
        # What came before the link was asked has been taken by now, also where this process stood
        # still meanwhile.
        overdue_seconds = self._deadline.overdue_seconds(asked_seconds)
        if overdue_seconds is not None:
            raise GroupLostError(
                f"the workers have not answered a step for {overdue_seconds:.0f} s"
            )

    def _note_timing(self, timing: StepTiming) -> None:
        self.timings.append(timing)
        self.step_seconds["plan"].observe(timing.plan_seconds)
        self.step_seconds["execute"].observe(timing.execute_seconds)
        self.step_seconds["apply"].observe(timing.apply_seconds)

    def _run_calls(self) -> None:
        while self._mailbox:
            function, future = self._mailbox.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                answer = function(self._core, time.monotonic())
            except _MISTAKES_OF_THE_CALLER as error:
                future.set_exception(error)
            except Exception as error:
                future.set_exception(core_crashed(error))
                raise
            else:
                future.set_result(answer)

    def _take(self, message: WorkerMessage) -> None:
        core = self._core
        epoch = core.group.epoch
        match message:
            case StepResult():
                now = time.monotonic()
                self._events.append(("result", message.epoch, message.step_id))
                core.apply(message, now)
                if message.epoch == epoch:
                    self._deadline.answered(now)
            case Heartbeat(epoch=said, rank=rank):
                if said == epoch and rank in self._missing_ranks:
                    self._missing_ranks.remove(rank)
                    if not self._missing_ranks:
                        core.fit(time.monotonic())
                        self._listener.on_joined(epoch)
            case WorkerFault(epoch=said):
                if said == epoch:
                    raise GroupLostError(
                        f"worker {message.rank} failed in step {message.step_id}: "
                        f"{message.kind}: {message.message}"
                    )

    def _publish_plans(self) -> None:
        core = self._core
        now = time.monotonic()
        while (plan := core.plan(now)) is not None:
            self._link.publish(plan)
            num_tokens = sum(work.num_tokens for work in plan.work)
            self._deadline.published(num_tokens, now)
            self._rate.add(num_tokens, now)
            self._events.append(_event_of(plan))

    def _report(self) -> None:
        core = self._core
        batches = core.take_batches()
        load = Load(
            running_requests=len(core.group.running),
            waiting_requests=len(core.waiting),
            waiting_tokens=core.waiting.num_tokens,
            tokens_per_second=self._rate.tokens_per_second,
        )
        if batches or load != self._load:
            self._load = load
            self._listener.on_news(batches, load)

    def _lose(self, reason: str, cause: InterruptionCause = InterruptionCause.WORKER_LOST) -> None:
        """Let everything wait for the next group; does nothing without one."""
        if not self._has_group:
            return
        core, link = self._core, self._link
        epoch, num_steps = core.group.epoch, core.group.window.next_result_id
        is_fault = cause is InterruptionCause.WORKER_LOST
        level = logging.ERROR if is_fault else logging.INFO
        logger.log(level, "the worker group of epoch %d is given up: %s", epoch, reason)
        lost_seconds = time.time()
        found_culprit = core.lose_group(time.monotonic(), cause)
        loss = GroupLoss(epoch, reason, num_steps, lost_seconds, found_culprit)
        self._link, self._has_group = _NoLink(), False
        self._deadline = self._new_deadline()
        self._report()
        self._listener.on_lost(loss)
        link.close()

    def _refuse_calls(self) -> None:
        while self._mailbox:
            _, future = self._mailbox.popleft()
            if future.set_running_or_notify_cancel():
                future.set_exception(LoopOverError("the step loop is over"))


class _NoLink:
    """Stands where a link would be while there is no group: nobody speaks, but calls wake it."""

    address = ""

    def __init__(self) -> None:
        self._woken = threading.Event()
        # A call that came just now has woken the link that was here before.
        self._woken.set()

    def publish(self, plan: StepPlan) -> None:
        raise LinkError("there is no worker group")

    def receive(self, timeout_seconds: float) -> list[WorkerMessage]:
        self._woken.wait(timeout_seconds)
        self._woken.clear()
        return []

    def wake(self) -> None:
        self._woken.set()

    def close(self) -> None:
        pass


class _Rate:
    """Tokens per second over the last second or so that had work; pauses do not count."""

    def __init__(self) -> None:
        self.tokens_per_second = 0.0
        self._num_tokens = 0
        self._since_seconds = 0.0
        self._last_seconds = 0.0

    def add(self, num_tokens: int, now: float) -> None:
        if now - self._last_seconds > _RATE_WINDOW_SECONDS:
            self._num_tokens, self._since_seconds = 0, now
        self._last_seconds = now
        elapsed_seconds = now - self._since_seconds
        if elapsed_seconds >= _RATE_WINDOW_SECONDS:
            self.tokens_per_second = round(self._num_tokens / elapsed_seconds, 1)
            self._num_tokens, self._since_seconds = 0, now
        self._num_tokens += num_tokens


def _event_of(plan: StepPlan) -> tuple[object, ...]:
    """Ids and counts only, never content."""
    return (
        "plan",
        plan.epoch,
        plan.step_id,
        [(type(update).__name__, update.seq.request_id) for update in plan.updates],
        sum(work.num_tokens for work in plan.work),
    )
