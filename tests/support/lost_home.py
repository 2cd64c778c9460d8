"""A node that dies together with the supervisor and the scheduler; clients elsewhere go on.

python -m tests.support.lost_home

The engine, of the fake model, had been resized before. Prints as JSON what was seen; what clients
got is compared here. A process of its own, because a process has one Ray.
"""

import asyncio
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from tests.support.leftovers import Leftovers
from tests.support.nodes import HEALTH_CHECK, HOSTS, ray_nodes
from tests.support.ray_cluster import set_environment

APP = "home"
NUM_STREAMS = 16
_PATIENCE_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class Seen:
    hosts_before: list[str]
    """Of the scheduler and all ranks."""
    hosts_after: list[str]
    shape: str
    """Of the engine under the next supervisor."""
    causes: list[str]
    seconds: float
    """From the death until the next engine was ready."""


async def run(kill_home: Any) -> Seen:
    from cluster.supervisor import existing_supervisors
    from scheduler.messages import SamplingParams
    from tests.support.engines import client_of, fake_spec, generate, request_of, status_of
    from tests.support.fake_model import MAX_POSITIONS, run_solo

    spec = fake_spec("model.model=fake-20ms", "parallel.cpus_per_rank=0.5")
    sampling = SamplingParams(max_tokens=150, seed=3)
    async with client_of(APP, spec) as client:
        await existing_supervisors()[APP].resize.remote(2, None)
        before = await status_of(APP)
        going = [
            asyncio.create_task(generate(client, request_of(client, f"r{i}", [i], sampling)))
            for i in range(NUM_STREAMS)
        ]
        while client.info().running_requests < NUM_STREAMS:
            await asyncio.sleep(0.02)
        killed_seconds = time.monotonic()
        await asyncio.to_thread(kill_home)
        while client.info().is_ready:
            await asyncio.sleep(0.02)
        assert (await client.wait_ready(60)).is_ready
        seconds = time.monotonic() - killed_seconds
        causes = set()
        for i, answer in enumerate(await asyncio.gather(*going)):
            solo = run_solo((i,), sampling, MAX_POSITIONS)
            assert (tuple(answer.token_ids), answer.finish) == (solo.token_ids, solo.finish)
            assert answer.usage is not None
            assert answer.usage.interruptions is not None
            causes |= set(answer.usage.interruptions.causes)
        after = await status_of(APP)
    return Seen(
        hosts_before=hosts_of(before),
        hosts_after=hosts_of(after),
        shape=str(after.shape),
        causes=sorted(causes),
        seconds=seconds,
    )


def hosts_of(status: Any) -> list[str]:
    return [place.host for place in (status.scheduler_place, *status.places)]


def start_supervisor_on(host: str) -> None:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def start() -> None:
        from cluster.supervisor import supervisor_of

        ray.get(supervisor_of(APP).process_id.remote())

    (node,) = [node for node in ray.nodes() if node["NodeManagerAddress"] == host]
    there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    ray.get(ray.remote(start).options(num_cpus=0, scheduling_strategy=there).remote())


def main() -> None:
    before = Leftovers.now()
    set_environment()
    os.environ.update(HEALTH_CHECK)
    home = HOSTS[1]
    with ray_nodes((HOSTS[0], home)) as nodes:
        from tests.support.engines import stop

        start_supervisor_on(home)
        seen = asyncio.run(run(lambda: nodes.kill(home)))
        asyncio.run(stop(APP))
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while (left := Leftovers.now().processes - before.processes) and time.monotonic() < deadline:
        time.sleep(0.2)
    sys.stdout.write(json.dumps(asdict(seen) | {"left": sorted(left)}) + "\n")


if __name__ == "__main__":
    main()
