"""When the requests of a load test are sent: at a rate, at recorded times, or one for one that
has ended."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np

from cluster.bench_client import BenchClient, Outcome
from cluster.bench_prompts import BenchRequest


@dataclass(frozen=True, slots=True)
class Pace:
    """Both limits hold; without any all requests are sent at once."""

    requests_per_second: float | None = None
    burstiness: float = 1.0
    """Shape of the gamma distribution of the pauses, whose mean the rate is: 1 is a Poisson
    process, below 1 requests come in bursts, far above 1 they come evenly."""
    concurrency: int | None = None
    """The most requests that are under way at a time."""


@dataclass(frozen=True, slots=True)
class LoadResult:
    outcomes: list[Outcome]
    """In the order of the requests."""
    duration_seconds: float
    """From the first request to the end of the last."""


def send_times(
    requests: Sequence[BenchRequest], pace: Pace, rng: np.random.Generator
) -> Iterator[float]:
    """For each request when it shall be sent, in seconds from the start."""
    at = 0.0
    for request in requests:
        if request.arrival_seconds is not None:
            yield request.arrival_seconds
            continue
        yield at
        if pace.requests_per_second is not None:
            mean_seconds = 1 / pace.requests_per_second
            at += rng.gamma(pace.burstiness, mean_seconds / pace.burstiness)


async def run_load(
    client: BenchClient,
    requests: Sequence[BenchRequest],
    pace: Pace,
    *,
    seed: int,
    on_end: Callable[[Outcome], None] = lambda outcome: None,
) -> LoadResult:
    """Send all requests; `on_end` is told of each as it ends."""
    places = nullcontext() if pace.concurrency is None else asyncio.Semaphore(pace.concurrency)

    async def one(request: BenchRequest) -> Outcome:
        async with places:
            outcome = await client.ask(request)
        on_end(outcome)
        return outcome

    began = time.perf_counter()
    tasks = []
    rng = np.random.default_rng(seed)
    for request, at in zip(requests, send_times(requests, pace, rng), strict=True):
        pause_seconds = began + at - time.perf_counter()
        if pause_seconds > 0:
            await asyncio.sleep(pause_seconds)
        tasks.append(asyncio.create_task(one(request)))
    outcomes = list(await asyncio.gather(*tasks))
    return LoadResult(outcomes, time.perf_counter() - began)
