"""The clients of the fake world: they submit, end, repeat themselves, and read what comes back."""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from scheduler.core import SchedulerCore
from scheduler.messages import (
    Accepted,
    EndReason,
    EndRequest,
    Message,
    NeverFits,
    QueueFull,
    decode,
    encode,
)
from tests.support.episode_config import EpisodeConfig
from tests.support.ledger import Ledger, MismatchError, Tracked
from tests.support.workload import Job, Workload

M = TypeVar("M", bound=Message)

_END_REASONS = (EndReason.ABORT, EndReason.STOP, EndReason.STOP, EndReason.SLOW_CLIENT)
_MEMORY_SECONDS = 60.0
"""How long the core remembers the ids of requests that have ended."""


def over_the_wire(message: M) -> M:
    """The message as another process would see it."""
    return decode(encode(message), type(message))


@dataclass(slots=True)
class Clock:
    """The time of the fake world, in seconds."""

    now: float = 0.0


class Clients:
    """All clients of one core."""

    def __init__(
        self,
        rng: random.Random,
        config: EpisodeConfig,
        ledger: Ledger,
        core: SchedulerCore,
        clock: Clock,
        log: Callable[[object], None],
    ) -> None:
        self._core = core
        self._clock = clock
        self._num_blocks = config.num_blocks
        self._rng = rng
        self._config = config
        self._ledger = ledger
        self._log = log
        self._workload = Workload(rng, config)
        self._early: deque[Job] = deque()
        """Requests whose end was sent before they are."""
        self._finished: deque[Job] = deque(maxlen=4)
        self._ended_seconds: dict[str, float] = {}
        """When the core learned of the end of an id; it forgets after a while."""

    # -- the pool, as a client is told of it ----------------------------------------------

    @property
    def _capacity_tokens(self) -> int:
        return (self._num_blocks - 1) * self._config.block_size

    def _fits(self, job: Job) -> bool:
        """Whether the size of the pool is no reason to refuse it."""
        num_prompt_tokens, sampling = len(job.prompt), job.message.sampling
        if num_prompt_tokens > self._capacity_tokens:
            return False
        num_total = min(num_prompt_tokens + sampling.max_tokens, self._config.max_model_len)
        # The last token needs no slot.
        return not sampling.ignore_eos or num_total - 1 <= self._capacity_tokens

    def _is_cut_off(self, tracked: Tracked) -> bool:
        """Whether an accepted request must end at once, because the pool is too small."""
        return not self._fits(tracked.job) or tracked.num_tokens > self._capacity_tokens

    def refit(self, num_blocks: int) -> None:
        """The workers are new and may have another number of blocks: who no longer fits ends."""
        self._num_blocks = num_blocks
        for tracked in self._ledger.live.values():
            tracked.capacity_tokens = self._capacity_tokens
            tracked.cut_off = self._is_cut_off(tracked)
        self.take()
        self._expect_cut_off_to_be_over()

    def _expect_cut_off_to_be_over(self) -> None:
        for tracked in self._ledger.live.values():
            if tracked.cut_off:
                raise MismatchError(
                    f"{tracked.request_id} needs more than {self._capacity_tokens} tokens, and "
                    f"lives on"
                )

    # -- submit ---------------------------------------------------------------------------

    def submit(self) -> None:
        """One call, or a few in the same instant."""
        self.offer(self._workload.draw(self._clock.now, is_first=not self._ledger.live))
        while not self._config.climbs and self._rng.random() < 0.2:
            self.offer(self._workload.draw(self._clock.now))

    def offer(self, jobs: list[Job], early_end: EndReason | None = None) -> None:
        """Submit unknown requests in one call. `early_end`: their end was sent before them."""
        expected = self._expected_admission(jobs)
        messages = [over_the_wire(job.message) for job in jobs]
        if self._rng.random() < 0.02:
            messages.append(messages[0])
        admission = self._core.submit(messages, self._clock.now)
        names = ", ".join(job.message.request_id for job in jobs)
        self._log(f"submit {names} with {len(jobs[0].prompt)} tokens: {admission}")
        if not isinstance(admission, expected):
            raise MismatchError(f"{names} got {admission}, expected {expected.__name__}")
        if isinstance(admission, Accepted):
            for job in jobs:
                tracked = self._ledger.accept(job, self._clock.now, self._capacity_tokens)
                tracked.end_reason = early_end
                tracked.cut_off = self._is_cut_off(tracked)
        else:
            self._ledger.seen[type(admission).__name__] += 1
        if early_end is not None or self._rng.random() < 0.5:
            self.take()

    def _expected_admission(self, jobs: list[Job]) -> type:
        new = [job for job in jobs if job.message.usage_so_far is None]
        if not all(self._fits(job) for job in new):
            return NeverFits
        waiting = self._core.waiting
        if new and waiting:
            num_tokens = waiting.num_tokens + sum(len(job.prompt) for job in new)
            if len(waiting) + len(new) > self._config.scheduler.max_waiting_requests:
                return QueueFull
            if num_tokens > self._config.scheduler.max_waiting_tokens:
                return QueueFull
        return Accepted

    def submit_again(self) -> None:
        """An id that lives, or did a moment ago: nothing happens. Later it is a new one."""
        jobs = [tracked.job for tracked in self._ledger.live.values()]
        if jobs and self._rng.random() < 0.5:
            self._repeat(self._rng.choice(jobs))
        elif self._finished:
            job = self._finished.popleft()
            remembered = self._is_remembered(job)
            if remembered:
                self._repeat(job)
            elif remembered is not None:
                self.offer([job])

    def _repeat(self, job: Job) -> None:
        self.take()
        self._log(f"submit {job.message.request_id} again")
        admission = self._core.submit([job.message], self._clock.now)
        if not isinstance(admission, Accepted) or self._core.take_batches():
            raise MismatchError(f"{job.message.request_id} submitted again: {admission}")
        self._ledger.seen["submitted again"] += 1

    def resubmit_all(self, core: SchedulerCore) -> None:
        """Go on with a scheduler that knows nothing: submit all that lives, with what it has."""
        self._core = core
        self._finished.clear()
        self._ended_seconds.clear()
        jobs = [tracked.continuation() for tracked in self._ledger.live.values()]
        jobs.sort(key=lambda job: job.message.arrival_seconds)
        self._ledger.start_books()
        for job in jobs:
            self.offer([job])
        self.take()
        self._expect_cut_off_to_be_over()

    # -- end ------------------------------------------------------------------------------

    def end_someone(self) -> None:
        self.take()
        live = list(self._ledger.live.values())
        if not live:
            return
        tracked = self._rng.choice(live)
        reason = self._rng.choice(_END_REASONS)
        num_output_tokens = None
        if reason is EndReason.STOP:
            if not tracked.received:
                return
            if self._rng.random() < 0.7:
                num_output_tokens = self._rng.randint(1, len(tracked.received))
        tracked.end_reason = reason
        tracked.end_tokens = num_output_tokens
        state = "running" if tracked.is_open else "preempted" if tracked.bill else "waiting"
        self._ledger.seen[f"ended while {state}"] += 1
        self._end(EndRequest(tracked.request_id, reason, num_output_tokens))
        if self._config.takes_at_once:
            self.take()
            if tracked.finish is None:
                raise MismatchError(f"{tracked.request_id} was ended and lives on")

    def end_before_submission(self) -> None:
        job = self._workload.draw(self._clock.now)[0]
        self._early.append(job)
        self._ended_seconds[job.message.request_id] = self._clock.now
        self._end(EndRequest(job.message.request_id, EndReason.ABORT))

    def submit_early_ended(self) -> None:
        if not self._early:
            return
        job = self._early.popleft()
        remembered = self._is_remembered(job)
        if remembered is not None:
            self._ledger.seen["end before submission"] += remembered
            self.offer([job], EndReason.ABORT if remembered else None)

    def _end(self, message: EndRequest) -> None:
        self._log(message)
        self._core.end(over_the_wire(message), self._clock.now)

    def _is_remembered(self, job: Job) -> bool | None:
        """Whether the core still knows the end of this request; None when that is about now."""
        age_seconds = self._clock.now - self._ended_seconds.get(job.message.request_id, -1e9)
        if abs(age_seconds - _MEMORY_SECONDS) < 2:
            return None
        return age_seconds < _MEMORY_SECONDS

    # -- read -----------------------------------------------------------------------------

    def take(self) -> bool:
        """Fetch the news and compare them with what must come; False if there are none."""
        batches = self._core.take_batches()
        for client_id, batch in batches.items():
            for delta in over_the_wire(batch).deltas:
                tracked = self._ledger.on_delta(client_id, delta, self._clock.now)
                if tracked.finish is not None:
                    self._finished.append(tracked.job)
                    self._ended_seconds[tracked.request_id] = self._clock.now
        return bool(batches)
