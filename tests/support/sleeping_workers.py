"""Pipeline stages that take their time: real threads, each asleep for as long as a stage computes.

What they compute is checked as in the fake world, so a window that cheats does not get far.
"""

import threading
import time
from queue import SimpleQueue
from typing import TypeAlias

from configs import ResolvedCacheConfig, ResolvedSchedulerConfig
from scheduler.core import SchedulerCore
from scheduler.messages import (
    Accepted,
    SamplingParams,
    StepPlan,
    StepResult,
    SubmitRequest,
    pack_token_ids,
)
from tests.support.fake_worker import Activations, Stage

_BLOCK_SIZE = 16
_NUM_BLOCKS = 200
_PROMPT_TOKENS = 20
_RESULT_SECONDS = 60.0

# None ends the thread.
_Inbox: TypeAlias = "SimpleQueue[tuple[StepPlan, Activations | None] | None]"


class SleepingStages:
    """Threads in a row. Whatever goes wrong in one of them is raised by `result`."""

    def __init__(self, num_stages: int, stage_seconds: float) -> None:
        self._stage_seconds = stage_seconds
        self._inboxes: list[_Inbox] = [SimpleQueue() for _ in range(num_stages)]
        self._results: SimpleQueue[StepResult | Exception] = SimpleQueue()
        stages = [Stage(i, num_stages, _NUM_BLOCKS, _BLOCK_SIZE) for i in range(num_stages)]
        self._threads = [threading.Thread(target=self._serve, args=(stage,)) for stage in stages]
        for thread in self._threads:
            thread.start()

    def publish(self, plan: StepPlan) -> None:
        self._inboxes[0].put((plan, None))

    def result(self) -> StepResult:
        """Waits for the next result."""
        result = self._results.get(timeout=_RESULT_SECONDS)
        if isinstance(result, Exception):
            raise result
        return result

    def close(self) -> None:
        """Finish what is under way and end all threads."""
        self._inboxes[0].put(None)
        for thread in self._threads:
            thread.join()

    def _serve(self, stage: Stage) -> None:
        inbox = self._inboxes[stage.index]
        while (message := inbox.get()) is not None:
            plan, received = message
            time.sleep(self._stage_seconds)
            try:
                activations, outputs = stage.execute(plan, received)
            except Exception as error:
                self._results.put(error)
                continue
            if stage.is_last:
                self._results.put(StepResult(plan.epoch, plan.step_id, outputs))
            else:
                self._inboxes[stage.index + 1].put((plan, activations))
        if not stage.is_last:
            self._inboxes[stage.index + 1].put(None)


def steps_per_second(
    steps_in_flight: int,
    *,
    num_stages: int = 3,
    stage_seconds: float = 0.02,
    num_requests: int = 6,
    num_steps: int = 45,
) -> float:
    """Steps a second of the core with `num_stages` sleeping stages and nothing but decoding."""
    core = SchedulerCore(
        scheduler=ResolvedSchedulerConfig(
            max_num_seqs=num_requests, max_num_batched_tokens=512, steps_in_flight=steps_in_flight
        ),
        cache=ResolvedCacheConfig(block_size=_BLOCK_SIZE, hash="xxh3_128"),
        num_blocks=_NUM_BLOCKS,
        max_model_len=1000,
        pipeline_stages=num_stages,
    )
    for i in range(num_requests):
        request = SubmitRequest(
            request_id=f"r{i}",
            client_id="client",
            prompt_token_ids=pack_token_ids([i % 8] * _PROMPT_TOKENS),
            sampling=SamplingParams(max_tokens=10 * num_steps, seed=i),
            arrival_seconds=0.0,
        )
        assert isinstance(core.submit([request], 0.0), Accepted)
    stages = SleepingStages(num_stages, stage_seconds)
    try:
        return _measure(core, stages, num_steps)
    finally:
        stages.close()


def _measure(core: SchedulerCore, stages: SleepingStages, num_steps: int) -> float:
    """Steps a second after all prompts are done and the pipeline is full."""
    num_results = 0
    began_seconds = time.perf_counter()
    warm_up = 3 * len(core.requests)
    while num_results < warm_up + num_steps:
        while (plan := core.plan(0.0)) is not None:
            stages.publish(plan)
        core.apply(stages.result(), 0.0)
        num_results += 1
        if num_results == warm_up:
            began_seconds = time.perf_counter()
    return num_steps / (time.perf_counter() - began_seconds)
