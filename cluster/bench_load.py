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
    num_cut_off: int = 0
    """Requests that were under way when the load was cancelled."""


class LoadCancelledError(asyncio.CancelledError):
    """Ends a load as any cancellation does; `result` is of the requests that had ended before."""

    def __init__(self, result: LoadResult) -> None:
        super().__init__(result)
        self.result = result


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
    """Send all requests; `on_end` is told of each as it ends.

    Raises LoadCancelledError when cancelled, after it has cut off what was under way.
    """
    num_sent = 0
    places = nullcontext() if pace.concurrency is None else asyncio.Semaphore(pace.concurrency)

    async def one(request: BenchRequest) -> Outcome:
        nonlocal num_sent
        async with places:
            num_sent += 1
            outcome = await client.ask(request)
        on_end(outcome)
        return outcome

    began = time.perf_counter()
    tasks = []
    times = send_times(requests, pace, np.random.default_rng(seed))
    try:
        for request, at in zip(requests, times, strict=True):
            pause_seconds = began + at - time.perf_counter()
            if pause_seconds > 0:
                await asyncio.sleep(pause_seconds)
            tasks.append(asyncio.create_task(one(request)))
        outcomes = await asyncio.gather(*tasks)
    except asyncio.CancelledError:
        duration_seconds = time.perf_counter() - began
        outcomes = await _cut_off(tasks)
        raise LoadCancelledError(
            LoadResult(outcomes, duration_seconds, num_sent - len(outcomes))
        ) from None
    return LoadResult(outcomes, time.perf_counter() - began)


async def _cut_off(tasks: Sequence[asyncio.Task[Outcome]]) -> list[Outcome]:
    """What came of those that had ended before."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return [task.result() for task in tasks if not task.cancelled()]
