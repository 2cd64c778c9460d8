"""Groups of real workers: the same text from every way to spread a model over processes."""

import asyncio
import random
from pathlib import Path

import pytest

from cluster.engine_spec import EngineSpec
from configs import load
from scheduler.messages import FinishReason, SamplingParams
from tests.support.engines import (
    client_of,
    counters_of,
    generate,
    request_of,
    status_of,
    stop,
    wait_idle,
)
from tests.support.models import make_smollm2_stand_in

VOCABULARY = 512
# Small enough that eight requests of up to 100 tokens preempt each other.
NUM_BLOCKS = 25


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_smollm2_stand_in(tmp_path_factory.mktemp("model"))


def spec_of(model: Path, *overrides: str) -> EngineSpec:
    settings = (f"model.model={model}", "model.dtype=float32", *overrides)
    return EngineSpec.of(load(overrides=settings, environ={}).config)


def texts_of(app: str, spec: EngineSpec) -> dict[str, list[int]]:
    """What eight requests yield, greedy and seeded, all at once."""
    rng = random.Random(2)

    async def run() -> dict[str, list[int]]:
        async with client_of(app, spec) as client:
            requests = {}
            for i in range(8):
                prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(3, 60))]
                sampling = SamplingParams(
                    max_tokens=60,
                    seed=i,
                    temperature=0.0 if i % 2 else 1.0,
                    top_k=20,
                    ignore_eos=True,
                )
                requests[f"r{i}"] = request_of(client, f"r{i}", prompt, sampling)
            answers = await asyncio.gather(
                *(generate(client, request) for request in requests.values())
            )
            await wait_idle(app)
            assert {answer.finish for answer in answers} == {FinishReason.LENGTH}
            return {name: a.token_ids for name, a in zip(requests, answers, strict=True)}

    return asyncio.run(run())


@pytest.fixture(scope="module")
def expected(model: Path, ray_cluster: None) -> dict[str, list[int]]:
    """From one worker with room for all."""
    texts = texts_of("alone", spec_of(model))
    asyncio.run(stop("alone"))
    return texts


@pytest.mark.parametrize(
    ("tp", "pp"),
    [
        (3, 1),
        (1, 2),
        pytest.param(1, 1, marks=pytest.mark.full),
        pytest.param(1, 3, marks=pytest.mark.full),
        pytest.param(3, 2, marks=pytest.mark.full),
    ],
)
def test_every_group_gives_the_same_text_in_a_small_pool(
    app: str, model: Path, expected: dict[str, list[int]], tp: int, pp: int
) -> None:
    spec = spec_of(
        model,
        f"parallel.tensor_parallel_size={tp}",
        f"parallel.pipeline_parallel_size={pp}",
        f"cache.num_blocks={NUM_BLOCKS}",
    )
    assert texts_of(app, spec) == expected
    status = asyncio.run(status_of(app))
    assert len(status.places) == tp * pp
    counters = asyncio.run(counters_of(app))
    assert counters.preemptions["blocks"] > 0
    assert counters.held_blocks == 0
    assert status.info.num_blocks == NUM_BLOCKS
