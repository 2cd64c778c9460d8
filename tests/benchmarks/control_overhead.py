"""What deciding costs: how long a worker waits between two steps, look-ahead off and on.

python -m tests.benchmarks.control_overhead --streams 32

The gap runs from the end of one step in the worker to the start of the next: the result's way to
the scheduler, applying it, planning, and the plan's way back. The fake model stands in for a real
one; its step sleeps, so it takes no core from the scheduler. `--model` measures with a real one.
"""

import argparse
import asyncio
import time

from scheduler.status import Spread, Timings
from tests.support.ray_cluster import local_ray, set_environment

APP = "control-overhead"
GOAL_MS = 1.5


async def measure(overrides: list[str], loader: str, num_streams: int, num_tokens: int) -> None:
    from cluster.engine_spec import EngineSpec
    from configs import load
    from scheduler.messages import SamplingParams
    from tests.support.engines import client_of, generate, request_of, status_of, stop, wait_idle

    spec = EngineSpec.of(load(overrides=overrides, environ={}).config, loader=loader)
    async with client_of(APP, spec) as client:
        began = time.monotonic()
        requests = [
            request_of(
                client,
                f"r{i}",
                [i % 32, 1, 2, 3],
                SamplingParams(num_tokens, seed=i, ignore_eos=True),
            )
            for i in range(num_streams)
        ]
        answers = await asyncio.gather(*(generate(client, request) for request in requests))
        seconds = time.monotonic() - began
        assert all(len(answer.token_ids) == num_tokens for answer in answers)
        await wait_idle(APP)
        status = await status_of(APP)
    await stop(APP)
    assert status.scheduler is not None
    report(status.scheduler.timings, num_streams * num_tokens / seconds)


def report(timings: Timings, tokens_per_second: float) -> None:
    print(f"  gap {told(timings.gap)}; step {told(timings.execute)}")
    print(
        f"  of the gap, in the scheduler: apply {told(timings.apply)}, plan and publish "
        f"{told(timings.plan)}"
    )
    print(f"  {tokens_per_second:.0f} tokens/s")


def told(spread: Spread | None) -> str:
    assert spread is not None, "there were steps"
    return f"{spread.median_ms:.2f} ms (p99 {spread.p99_ms:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.control_overhead")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--step-ms", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--link", choices=["zmq", "ray"], default="zmq")
    parser.add_argument("--model", help="a real model in place of the fake one")
    parser.add_argument("--set", action="append", default=[], help="as of `palimpsest serve`")
    options = parser.parse_args()
    kind = "worker.member:load_rank" if options.model else "tests.support.fake_rank:load_fake_rank"
    set_environment()
    with local_ray():
        for steps_in_flight in (1, 2):
            overrides = [
                f"model.model={options.model or f'fake-{options.step_ms}ms'}",
                f"scheduler.steps_in_flight={steps_in_flight}",
                f"parallel.tensor_parallel_size={options.ranks}",
                f"parallel.plan_link={options.link}",
                "cache.num_blocks=4096",
                *options.set,
            ]
            look_ahead = "on" if steps_in_flight > 1 else "off"
            print(f"{options.streams} streams, {options.ranks} ranks, look-ahead {look_ahead}:")
            asyncio.run(measure(overrides, kind, options.streams, options.tokens))
    print(f"Goal: at most {GOAL_MS} ms in the median at 32 streams with look-ahead off.")


if __name__ == "__main__":
    main()
