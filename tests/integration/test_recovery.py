"""SmolLM2 in float32 on several processes that are killed: ids and log probabilities stay."""

import asyncio
import contextlib
import functools
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from cluster.engine_client import EngineClient
from cluster.engine_spec import EngineSpec
from configs import load
from scheduler.messages import (
    Accepted,
    EngineState,
    FinishReason,
    InterruptionCause,
    SamplingParams,
    TokenLogprobs,
)
from tests.support.engines import client_of, counters_of, generate, request_of, status_of, wait_idle
from tests.support.faults import kill
from tests.support.http_jobs import OPENINGS
from tests.support.models import make_stories_stand_in
from worker.pull import pull

MODEL = "smollm2-135m"
MAX_LOGPROB_ERROR = 1e-4
WORKER_LOST = InterruptionCause.WORKER_LOST


@dataclass
class Told:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None
    num_losses: int = 0


def sampling_of(number: int, num_tokens: int) -> SamplingParams:
    """Greedy, seeded, with penalties, with log probabilities."""
    return SamplingParams(
        num_tokens,
        seed=number,
        temperature=(0.0, 0.8, 0.0, 1.0)[number % 4],
        top_p=0.95,
        repetition_penalty=1.1 if number % 4 == 2 else 1.0,
        frequency_penalty=0.3 if number % 4 == 3 else 0.0,
        logprobs=2 if number % 2 else None,
        ignore_eos=True,
    )


@functools.cache
def prompt_of(number: int) -> list[int]:
    """Words that mean something: after others nearly all tokens are equally likely, and rounding
    alone decides between neighbours."""
    tokenizer = Tokenizer.from_file(str(pull(MODEL) / "tokenizer.json"))
    opening = OPENINGS[number % len(OPENINGS)]
    token_ids: list[int] = tokenizer.encode(f"{opening} {number} of them").ids
    return token_ids


async def tell(client: EngineClient, name: str, number: int, num_tokens: int) -> Told:
    sampling = sampling_of(number, num_tokens)
    request = request_of(client, f"{name}-{number}", prompt_of(number), sampling)
    assert isinstance(await client.submit([request]), Accepted)
    told = Told()
    async for delta in client.stream(request.request_id):
        assert delta.error is None, delta.error
        told.token_ids += delta.token_ids
        told.logprobs += delta.logprobs
        told.finish = delta.finish
        if delta.usage is not None and delta.usage.interruptions is not None:
            told.num_losses = delta.usage.interruptions.causes.get(WORKER_LOST, 0)
    return told


async def tell_all(
    client: EngineClient, name: str, num_streams: int, num_tokens: int
) -> list[Told]:
    return list(
        await asyncio.gather(*(tell(client, name, i, num_tokens) for i in range(num_streams)))
    )


def assert_same(told: Told, expected: Told) -> None:
    pairs = zip(told.token_ids, expected.token_ids, strict=True)
    for at, (token_id, expected_id) in enumerate(pairs):
        rated = told.logprobs[at : at + 1], expected.logprobs[at : at + 1]
        assert token_id == expected_id, f"they differ from token {at} on: {rated}"
    assert told.finish is expected.finish
    assert len(told.logprobs) == len(expected.logprobs)
    for row, other in zip(told.logprobs, expected.logprobs, strict=True):
        assert abs(row.logprob - other.logprob) < MAX_LOGPROB_ERROR


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("tp", "pp", "num_streams", "num_kills"),
    [
        (3, 1, 8, 3),
        pytest.param(3, 1, 32, 15, marks=pytest.mark.full),
        pytest.param(1, 2, 32, 15, marks=pytest.mark.full),
    ],
)
def test_kills_change_no_token(
    app: str, tp: int, pp: int, num_streams: int, num_kills: int
) -> None:
    num_tokens = 48
    spec = EngineSpec.of(
        load(
            overrides=[
                f"model.model={pull(MODEL)}",
                "model.dtype=float32",
                f"parallel.tensor_parallel_size={tp}",
                f"parallel.pipeline_parallel_size={pp}",
                "cache.num_blocks=600",
            ],
            environ={},
        ).config
    )

    async def kill_in_the_middle(client: EngineClient, number: int, expected: list[Told]) -> None:
        status, before = await status_of(app), await counters_of(app)
        num_expected = sum(len(one.token_ids) for one in expected)
        num_wanted = before.scheduled_output_tokens + 1 + rng.random() * num_expected / 2
        telling = asyncio.create_task(tell_all(client, f"kill-{number}", num_streams, num_tokens))
        while (await counters_of(app)).scheduled_output_tokens < num_wanted:
            await asyncio.sleep(0.05)
        kill(status.places[number % len(status.places)].process_id)
        told = await telling
        for one, other in zip(told, expected, strict=True):
            assert_same(one, other)
        assert any(one.num_losses for one in told)
        counters = await wait_idle(app)
        assert counters.held_blocks == 0
        status = await status_of(app)
        assert status.info.state is EngineState.READY
        assert status.num_recoveries == number + 1

    rng = random.Random(num_kills)

    async def run() -> None:
        async with client_of(app, spec) as client:
            expected = await tell_all(client, "undisturbed", num_streams, num_tokens)
            for number in range(num_kills):
                await kill_in_the_middle(client, number, expected)

    asyncio.run(run())


@contextlib.contextmanager
def busy_machine() -> Iterator[None]:
    """Twice as many processes that only compute as there are cores, as nice as Ray's are."""
    command = [sys.executable, "-c", "while True: pass"]
    burners = [subprocess.Popen(command) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_machine_that_is_far_too_busy_is_no_death(app: str, tmp_path: Path) -> None:
    spec = EngineSpec.of(
        load(
            overrides=[
                f"model.model={make_stories_stand_in(tmp_path)}",
                "parallel.tensor_parallel_size=2",
                "parallel.pipeline_parallel_size=2",
                "cache.num_blocks=200",
            ],
            environ={},
        ).config
    )

    async def run() -> None:
        async with client_of(app, spec) as client:
            with busy_machine():
                rng, number, num_steps = random.Random(5), 0, 0
                while num_steps < 1000:
                    requests = [
                        request_of(
                            client,
                            f"r{number}-{i}",
                            [rng.randrange(500) for _ in range(rng.randint(1, 300))],
                            SamplingParams(rng.randint(1, 60), seed=i, ignore_eos=True),
                        )
                        for i in range(12)
                    ]
                    answers = await asyncio.gather(*(generate(client, r) for r in requests))
                    assert {answer.finish for answer in answers} == {FinishReason.LENGTH}
                    number += 1
                    num_steps = (await wait_idle(app)).next_step_id
                    assert (await status_of(app)).num_recoveries == 0

    asyncio.run(run())
