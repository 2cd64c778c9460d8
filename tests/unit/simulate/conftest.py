"""A configuration and short runs of the simulator, as its tests need them."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from configs import load, resolve
from scheduler.simulate import SimulationResult, StepCosts, TraceRequest, simulate

Run = Callable[..., SimulationResult]

NO_LIMITS = ("scheduler.max_waiting_requests=1000000", "scheduler.max_waiting_tokens=1000000000")


@pytest.fixture
def run() -> Run:
    """Simulates with 1,000 prefill tokens/s and 10 ms a step, so that times can be told by hand."""

    def run(
        requests: Sequence[TraceRequest],
        *settings: str,
        num_blocks: int = 1001,
        max_model_len: int = 4096,
        pipeline_stages: int = 1,
        on_progress: Callable[[int], None] = lambda ended: None,
    ) -> SimulationResult:
        config = resolve(
            load(None, ["scheduler.steps_in_flight=1", *NO_LIMITS, *settings], {}).config, "cuda"
        )
        return simulate(
            requests,
            scheduler=config.scheduler,
            cache=config.cache,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            costs=StepCosts(prefill_tokens_per_second=1000, decode_step_seconds=0.01),
            pipeline_stages=pipeline_stages,
            on_progress=on_progress,
        )

    return run


@pytest.fixture
def example_trace() -> Path:
    return Path(__file__).parents[3] / "examples" / "chat.jsonl"
