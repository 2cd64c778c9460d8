"""A node that dies under running streams, its work done elsewhere: three stages of one model on
nodes of one machine.

python -m tests.support.lost_nodes MODEL_DIRECTORY spare|join|fewer [SETTING…]

`spare`: a fourth node is free. `join`: there is none, and one joins when the engine has said that
it waits for it. `fewer`: there is none, and the engine is told to make do with two. Prints as JSON
what was seen; what clients got is compared here. A process of its own: it can have one Ray only.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from tests.support.leftovers import Leftovers
from tests.support.nodes import HEALTH_CHECK, HOSTS, SPARE_HOST, Nodes, ray_nodes
from tests.support.ray_cluster import set_environment

How: TypeAlias = Literal["spare", "join", "fewer"]

NUM_STREAMS = 16
_PATIENCE_SECONDS = 15.0
_LACK_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Seen:
    victim: str
    hosts_before: list[str]
    """Of all ranks."""
    hosts_after: list[str]
    replaced: list[str]
    ready: dict[str, Any]
    """What `/ready` said while there was no room; empty with a spare node."""
    status_reason: str
    """The same of `palimpsest status`."""
    num_told: int
    """Lines of the log that tell of it."""
    causes: dict[str, int]
    held_blocks: int
    seconds: dict[str, float]
    """After the death: until it was noticed, until Ray knew, until all was as before."""


def jobs() -> list[Any]:
    drawn = []
    for number in range(NUM_STREAMS):
        body: dict[str, Any] = {"max_tokens": 60 + 4 * number, "stream": number % 4 < 3}
        body |= {"temperature": 0} if number % 2 else {"seed": number, "top_p": 0.9}
        body |= {"prompt": f"Once upon a time number {number} was", "ignore_eos": True}
        drawn.append(("/v1/completions", body))
    return drawn


def run(model: Path, nodes: Nodes, how: How, settings: list[str]) -> Seen:
    from tests.support.serving import deployed, free_port, serve_on

    port = free_port()
    common = (
        f"model.model={model}",
        "model.dtype=float32",
        "cache.num_blocks=1500",
        "parallel.pipeline_parallel_size=3",
        "parallel.cpus_per_rank=1",
        *settings,
    )
    others = HOSTS[1:] if how != "spare" else (*HOSTS[1:], SPARE_HOST)
    with serve_on(port), deployed("nodes", port, *common, waits=False) as app:
        # All but the workers have their places by then, on the first node.
        wait_until(lambda: any("SchedulerProcess" in title for title in nodes.titles(HOSTS[0])))
        for host in others:
            nodes.add(host)
        app.wait_ready()
        return lose_one(app, nodes, how)


def lose_one(app: Any, nodes: Nodes, how: How) -> Seen:
    import ray

    from cluster.supervisor import existing_supervisors
    from tests.support.faults import undisturbed, wait_recovered

    load = undisturbed(app, jobs())
    hosts = [place.host for place in app.status().places]
    # Neither clients' connections, nor the scheduler, nor Ray end there.
    victim = next(host for host in hosts if host != HOSTS[0])
    lack: dict[str, Any] = {}
    num_told_before = num_told()
    with load.running():
        load.wait_busy()
        killed_seconds = time.time()
        nodes.kill(victim)
        known_seconds = wait_until(lambda: victim not in alive_hosts())
        if how != "spare":
            lack = wait_for_lack(app)
        if how == "join":
            nodes.add(SPARE_HOST)
        elif how == "fewer":
            ray.get(existing_supervisors()[app.name].resize.remote(None, 2))
        recovery = wait_recovered(app, 1)
    app.wait_idle()
    after = app.status()
    return Seen(
        victim=victim,
        hosts_before=hosts,
        hosts_after=[place.host for place in after.places],
        replaced=list(recovery.replaced),
        ready=lack.get("ready", {}),
        status_reason=lack.get("status", ""),
        num_told=num_told() - num_told_before,
        causes=dict(load.causes),
        held_blocks=app.counters().held_blocks,
        seconds={
            "noticed": recovery.noticed_seconds - killed_seconds,
            "known to Ray": known_seconds - killed_seconds,
            "recovered": recovery.joined_seconds - killed_seconds,
        },
    )


def alive_hosts() -> set[str]:
    import ray

    return {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}


def wait_until(is_so: Callable[[], bool]) -> float:
    """The time at which it was."""
    deadline = time.monotonic() + _LACK_SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return time.time()


def wait_for_lack(app: Any) -> dict[str, Any]:
    """What is told of it as soon as it is told."""
    import httpx

    told: dict[str, Any] = {}

    def is_told() -> bool:
        answer = httpx.get(f"{app.url}/ready", timeout=10)
        told["ready"] = {**answer.json(), "code": answer.status_code}
        told["status"] = app.status().info.reason
        return "waiting for" in told["ready"].get("reason", "") and "waiting for" in told["status"]

    wait_until(is_told)
    return told


def num_told() -> int:
    from tests.support.serving import session_logs

    return sum(
        "waiting for" in line
        for path in session_logs()
        for line in path.read_text(errors="replace").splitlines()
        if "WARNING" in line
    )


def main() -> None:
    model, how, *settings = sys.argv[1:]
    assert how in get_args(How)
    before = Leftovers.now()
    set_environment()
    for name, value in HEALTH_CHECK.items():
        os.environ.setdefault(name, value)
    with tempfile.TemporaryDirectory() as folder, ray_nodes(HOSTS[:1]) as nodes:
        from tests.support.served_model import ready_to_serve

        directory = ready_to_serve(Path(model), Path(folder))
        seen = run(directory, nodes, how, settings)  # type: ignore[arg-type]
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while (left := Leftovers.now().processes - before.processes) and time.monotonic() < deadline:
        time.sleep(0.2)
    sys.stdout.write(json.dumps(asdict(seen) | {"left": sorted(left)}) + "\n")


if __name__ == "__main__":
    main()
