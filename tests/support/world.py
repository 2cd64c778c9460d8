"""The fake world: a seeded random driver of the real core, and checks after everything it does.

Within an episode clients submit and end requests, plans are made, stages obey them one at a
time and out of step with each other, results come back late, groups and schedulers are lost,
grow and shrink. Everything drains at the end, and every book must balance.
"""

import random
from collections import deque
from contextlib import AbstractContextManager, nullcontext

from scheduler import invariants
from scheduler.core import SchedulerCore
from scheduler.errors import CacheInUseError
from scheduler.messages import InterruptionCause, StepPlan, StepResult
from tests.support.clients import Clients, Clock, over_the_wire
from tests.support.episode_config import EpisodeConfig, Ranges
from tests.support.fake_worker import FakeWorkerGroup
from tests.support.ledger import Ledger, MismatchError
from tests.support.plan_rules import PlanRules

_OUTSIDE_CAUSES = (
    InterruptionCause.WORKER_LOST,
    InterruptionCause.RESIZE,
    InterruptionCause.DRAIN,
)
_MAX_DRAIN_TURNS = 100_000
_PATIENCE_STEPS = 300
"""So many plans without news for anyone mean that the core only keeps itself busy."""
_NUM_EVENTS_TOLD = 40


class Bug:
    """A fault put between the core and its workers; by itself it does nothing."""

    def installed(self, config: EpisodeConfig) -> AbstractContextManager[None]:
        """Entered for as long as the episode lasts."""
        return nullcontext()

    def after_publish(self, group: FakeWorkerGroup, rng: random.Random) -> None:
        """A plan has just been queued at every stage."""

    def on_result(
        self, core: SchedulerCore, group: FakeWorkerGroup, result: StepResult
    ) -> StepResult:
        """What the core is given in place of `result`."""
        return result


class Episode:
    """One configuration, from its first request to its last."""

    def __init__(
        self,
        rng: random.Random,
        ranges: Ranges,
        *,
        bug: Bug | None = None,
        check_invariants: bool = True,
    ) -> None:
        self._rng = rng
        self.config = EpisodeConfig.draw(rng, ranges)
        self._bug = bug or Bug()
        self._check_invariants = check_invariants
        self.num_steps = 0
        self.events: deque[tuple[float, object]] = deque(maxlen=_NUM_EVENTS_TOLD)
        self.ledger = Ledger(self.config)
        self._clock = Clock()
        self._num_blocks = self.config.num_blocks
        self._stale_results: deque[StepResult] = deque()
        self._zombie: FakeWorkerGroup | None = None
        self._num_steps_without_news = 0
        self._is_high_tide = True
        """Requests keep coming in, if so after each step."""
        self._arrival_due = True
        self._may_plan = True
        """Something has changed since the core had nothing to plan."""
        self._core = self._new_core()
        self._clients = Clients(rng, self.config, self.ledger, self._core, self._clock, self._log)
        self._form_group()
        self._redraw_pace()
        self._disturbances = (
            (self._clients.end_someone, self.config.end),
            (self._lose_group, self.config.lose_group),
            (self._lose_scheduler, self.config.lose_scheduler),
            (self._clients.end_before_submission, 0.002),
            (self._clients.submit_early_ended, 0.002),
            (self._clients.submit_again, 0.004),
            (self._poison_someone, 0.002),
            (self._reset_prefix_cache, 0.004),
            (self._let_time_pass, 0.002),
            (self._redraw_pace, 0.002),
        )
        self._disturbed = sum(probability for _, probability in self._disturbances)

    def run(self) -> None:
        """Raises at the first thing that is not as it must be."""
        rng = self._rng
        while self.num_steps < self.config.num_steps:
            self._clock.now += rng.random() * 0.02
            if rng.random() < self._disturbed:
                self._disturb()
            if self._arrival_due:
                self._arrival_due = False
                self._arrive()
            self._work()
        self._drain()

    def _arrive(self) -> None:
        config, num_live = self.config, len(self.ledger.live)
        if num_live >= config.num_live:
            self._is_high_tide = False
        elif num_live <= config.num_left:
            self._is_high_tide = True
        if self._is_high_tide and (config.climbs or self._rng.random() < 0.4):
            self._clients.submit()
            self._after_event()

    # -- what happens now and then -------------------------------------------------------

    def _disturb(self) -> None:
        actions, weights = zip(*self._disturbances, strict=True)
        (action,) = self._rng.choices(actions, weights)
        action()
        self._after_event()

    def _poison_someone(self) -> None:
        running = [tracked for tracked in self.ledger.live.values() if tracked.is_open]
        if running:
            tracked = self._rng.choice(running)
            self._log(f"the next output of {tracked.request_id} is an error")
            tracked.poisoned = True
            self._group.poison(tracked.request_id)

    def _reset_prefix_cache(self) -> None:
        pool = self._core.group.pool
        num_held = pool.num_held
        try:
            self._core.reset_prefix_cache()
        except CacheInUseError:
            if not num_held:
                raise
        else:
            self._log("prefix cache reset")
            self.ledger.seen["cache resets"] += 1
            if num_held or pool.num_scratch != self._num_blocks - 1:
                raise MismatchError(
                    f"reset with {num_held} blocks held left {pool.num_scratch} scratch"
                )

    def _let_time_pass(self) -> None:
        self._clients.take()
        self._clock.now += self._rng.choice((1.0, 30.0, 70.0))

    def _redraw_pace(self) -> None:
        """How eagerly plans are made and results fetched; one stage's step weighs 1."""
        if self._rng.random() < 0.5:
            self._plan_weight, self._deliver_weight = 4.0, 0.3
        else:
            self._plan_weight = self._rng.uniform(0.5, 4.0)
            self._deliver_weight = self._rng.uniform(0.2, 2.0)

    # -- losses --------------------------------------------------------------------------

    def _new_core(self) -> SchedulerCore:
        config = self.config
        return SchedulerCore(
            scheduler=config.scheduler,
            cache=config.cache,
            num_blocks=self._num_blocks,
            max_model_len=config.max_model_len,
            pipeline_stages=config.num_stages,
        )

    def _form_group(self) -> None:
        """New workers, who know nothing."""
        config = self.config
        self._group = FakeWorkerGroup(config.num_stages, self._num_blocks, config.block_size)
        self._group.report_all_work(config.reports_all_work)
        self._rules = PlanRules(config, self.ledger, self._num_blocks)
        self._num_in_flight = 0

    def _lose_group(self) -> None:
        """Everything on the workers is gone, but what they have said may still arrive."""
        rng, ledger = self._rng, self.ledger
        self._clients.take()
        cause = rng.choice(_OUTSIDE_CAUSES)
        num_blocks = None
        if cause is InterruptionCause.RESIZE or rng.random() < 0.1:
            usual = self.config.num_blocks
            fewest = 4 if rng.random() < 0.3 else max(4, usual * 2 // 3)
            num_blocks = self._num_blocks = rng.randint(fewest, usual * 4 // 3)
        self._zombie = None
        if rng.random() < 0.5:
            self._stale_results.extend(self._group.results)
        if rng.random() < 0.5:
            self._zombie = self._group
            self._zombie.results.clear()
        self._log(f"group lost: {cause}, {self._num_blocks} blocks from now on")
        core = self._core
        core.lose_group(self._clock.now, cause)
        if num_blocks is not None:
            core.begin_epoch(core.group.epoch + 1, 2)  # this one never stands
            core.begin_epoch(core.group.epoch + 1, num_blocks)
            core.fit(self._clock.now)
        ledger.seen["group losses"] += 1
        for tracked in ledger.live.values():
            if tracked.is_open:
                ledger.interrupt(tracked, cause, self._clock.now)
        self._clients.refit(self._num_blocks)
        self._form_group()

    def _lose_scheduler(self) -> None:
        """The clients submit what they have again, to a scheduler that knows nothing."""
        self._clients.take()
        self._log("scheduler lost")
        self._stale_results.clear()
        self._zombie = None
        self.ledger.seen["scheduler losses"] += 1
        self._core = self._new_core()
        self._form_group()
        self._clients.resubmit_all(self._core)

    # -- steps ---------------------------------------------------------------------------

    def _work(self) -> None:
        """Plan, let one stage obey its next plan, or fetch a result: whatever is possible."""
        group, zombie = self._group, self._zombie
        ready = group.ready()
        may_plan = self._may_plan and self._num_in_flight < self.config.scheduler.steps_in_flight
        plan_weight = self._plan_weight if may_plan else 0.0
        deliver_weight = self._deliver_weight if group.results or self._stale_results else 0.0
        choice = self._rng.random() * (plan_weight + deliver_weight + len(ready))
        if choice < plan_weight:
            self._plan()
        elif choice < plan_weight + deliver_weight:
            self._deliver()
        elif ready:
            group.advance(ready[int(choice - plan_weight - deliver_weight)])
        if zombie is not None and self._rng.random() < 0.2:
            self._advance_zombie(zombie)

    def _advance_zombie(self, zombie: FakeWorkerGroup) -> None:
        """Workers of a group that was given up go on with the plans they have."""
        ready = zombie.ready()
        if ready:
            zombie.advance(ready[0])
        self._stale_results.extend(zombie.results)
        zombie.results.clear()

    def _plan(self) -> None:
        plan = self._core.plan(self._clock.now)
        if plan is None:
            self._may_plan = False
            self._arrival_due = True
            if not self._num_in_flight and self._core.requests:
                raise MismatchError(f"nothing is planned for {len(self._core.requests)} requests")
            return
        self._log(plan)
        self._rules.on_plan(plan)
        self._rules.check_findable(self._core.group.pool)
        self.ledger.on_plan(plan, self._clock.now)
        self._num_steps_without_news += 1
        if self._num_steps_without_news > _PATIENCE_STEPS:
            raise MismatchError(f"{len(self._core.requests)} requests make no progress")
        self._group.publish(over_the_wire(plan))
        self._bug.after_publish(self._group, self._rng)
        self._num_in_flight += 1
        if self._num_in_flight == self.config.scheduler.steps_in_flight:
            self.ledger.seen["full windows"] += 1
        self.num_steps += 1
        self._arrival_due = True
        self._check(plan)

    def _deliver(self) -> None:
        results, stale = self._group.results, self._stale_results
        is_stale = bool(stale) and (not results or self._rng.random() < 0.5)
        result = over_the_wire((stale if is_stale else results).popleft())
        self._log(result)
        self._core.apply(self._bug.on_result(self._core, self._group, result), self._clock.now)
        if is_stale:
            self.ledger.seen["stale results"] += 1
        else:
            self._num_in_flight -= 1
            self._rules.on_result()
        if self.config.takes_at_once or self._rng.random() < 0.3:
            self._num_steps_without_news *= not self._clients.take()
        self._after_event()

    def _log(self, event: object) -> None:
        self.events.append((self._clock.now, event))

    def _after_event(self) -> None:
        self._may_plan = True
        self._check()

    def _check(self, plan: StepPlan | None = None) -> None:
        if self._check_invariants:
            invariants.check(self._core, plan)

    # -- the end -------------------------------------------------------------------------

    def _drain(self) -> None:
        core = self._core
        for _ in range(_MAX_DRAIN_TURNS):
            if not (self.ledger.live or self._num_in_flight) and core.is_idle:
                break
            self._clock.now += 0.01
            self._work()
            if not core.requests:
                self._clients.take()
        else:
            raise MismatchError(f"{len(self.ledger.live)} requests do not come to an end")
        if core.plan(self._clock.now) is not None or core.take_batches():
            raise MismatchError("there is still something to say when all is over")
        for stage in self._group.stages:
            if stage.mirrors:
                raise MismatchError(
                    f"stage {stage.index} still has tables of {list(stage.mirrors)}"
                )
        pool = core.group.pool
        if pool.num_held:
            raise MismatchError(f"{pool.num_held} blocks are held when all is over")
        self._reset_prefix_cache()
        self.ledger.compare(core.accounting)
