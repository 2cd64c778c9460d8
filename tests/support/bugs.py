"""Faults that the fake world must find. Each is a switch beside the core, none a hook within it."""

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from unittest import mock

from msgspec import structs

from scheduler.block_pool import BlockPool
from scheduler.core import SchedulerCore
from scheduler.group import WorkerGroup
from scheduler.kv_manager import KVManager
from scheduler.messages import SeqRef, StepResult
from scheduler.request import Request
from tests.support.episode_config import EpisodeConfig
from tests.support.fake_worker import FakeWorkerGroup
from tests.support.world import Bug

_PLACEHOLDER = 0
"""What stands for a token id that is not known yet."""


def _with_attempts(result: StepResult, attempts: dict[str, int]) -> StepResult:
    """`result` with other attempts, where `attempts` names one."""
    outputs = tuple(
        structs.replace(
            output,
            seq=SeqRef(
                output.seq.request_id, attempts.get(output.seq.request_id, output.seq.attempt)
            ),
        )
        for output in result.outputs
    )
    return structs.replace(result, outputs=outputs)


class OpenedAgainAtOnce(Bug):
    """A preempted request is opened again while work of it is still in flight.

    No fault: late results then meet another attempt, and the tag keeps them apart. With a
    pipeline it would be one, since there no request may be in two plans.
    """

    @contextmanager
    def installed(self, config: EpisodeConfig) -> Iterator[None]:
        def is_in_flight(group: WorkerGroup, request: Request) -> bool:
            return False

        if config.num_stages > 1:
            yield
            return
        with mock.patch.object(WorkerGroup, "is_in_flight", is_in_flight):
            yield


class NoAttemptTag(OpenedAgainAtOnce):
    """Results are applied by request id alone, to whatever attempt is current."""

    def on_result(
        self, core: SchedulerCore, group: FakeWorkerGroup, result: StepResult
    ) -> StepResult:
        attempts = {name: request.attempt for name, request in core.requests.items()}
        return _with_attempts(result, attempts)


class NewestAttempt(OpenedAgainAtOnce):
    """Workers stamp a result with the newest attempt they have heard of when they send it."""

    def on_result(
        self, core: SchedulerCore, group: FakeWorkerGroup, result: StepResult
    ) -> StepResult:
        mirrors = group.stages[-1].mirrors
        return _with_attempts(result, {name: m.seq.attempt for name, m in mirrors.items()})


class AttemptBehind(Bug):
    """Workers stamp the results of a reopened table with the attempt before."""

    def on_result(
        self, core: SchedulerCore, group: FakeWorkerGroup, result: StepResult
    ) -> StepResult:
        attempts = {
            output.seq.request_id: max(1, output.seq.attempt - 1) for output in result.outputs
        }
        return _with_attempts(result, attempts)


class FreedEarly(Bug):
    """Freeing a block ignores that others share it."""

    @contextmanager
    def installed(self, config: EpisodeConfig) -> Iterator[None]:
        free = BlockPool.free

        def free_for_all(pool: BlockPool, blocks: Iterable[int]) -> None:
            for block in blocks:
                for _ in range(max(1, pool.ref_count(block))):
                    free(pool, (block,))

        with mock.patch.object(BlockPool, "free", free_for_all):
            yield


class SwappedPlans(Bug):
    """One stage now and then obeys a plan before the one that it should follow."""

    def after_publish(self, group: FakeWorkerGroup, rng: random.Random) -> None:
        queue = group.queues[-1]
        if len(queue) > 1 and rng.random() < 0.2:
            first, second = queue[-2], queue[-1]
            queue[-2] = structs.replace(second, step_id=first.step_id)
            queue[-1] = structs.replace(first, step_id=second.step_id)


class KeptHash(Bug):
    """Blocks keep the hash of work that was taken back before it was done."""

    @contextmanager
    def installed(self, config: EpisodeConfig) -> Iterator[None]:
        def take_nothing_back(kv: KVManager, request: Request, start: int) -> None:
            pass

        with mock.patch.object(KVManager, "take_back", take_nothing_back):
            yield


class EarlyHash(Bug):
    """A block is hashed as soon as its slots are planned, with placeholders for unknown ids."""

    @contextmanager
    def installed(self, config: EpisodeConfig) -> Iterator[None]:
        register = KVManager.register

        def register_planned(kv: KVManager, request: Request) -> None:
            known = request.token_ids
            num_unknown = max(0, request.num_computed - len(known))
            request.token_ids = known + type(known)("i", [_PLACEHOLDER] * num_unknown)
            register(kv, request)
            request.token_ids = known

        with mock.patch.object(KVManager, "register", register_planned):
            yield


BUGS: dict[str, type[Bug]] = {
    "no-attempt-tag": NoAttemptTag,
    "newest-attempt": NewestAttempt,
    "attempt-behind": AttemptBehind,
    "freed-early": FreedEarly,
    "swapped-plans": SwappedPlans,
    "kept-hash": KeptHash,
    "early-hash": EarlyHash,
}
