"""One model over three nodes of one machine, each with an address of its own: the network is the
only way between them.

python -m tests.support.several_nodes MODEL_DIRECTORY

Asks the same of an engine of one worker and of one whose three pipeline stages are on three nodes,
over HTTP, and prints as JSON what both said. A process of its own, because a process has one Ray.
"""

import asyncio
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.support.leftovers import Leftovers
from tests.support.nodes import HOSTS, ray_nodes
from tests.support.ray_cluster import set_environment

NUM_BLOCKS = 25
_PATIENCE_SECONDS = 15.0
PROMPTS = (
    "Once upon a time, there was a little girl named Lily.",
    "Tom had a red ball. He liked to play with it",
    "The big dog ran to the park and saw",
    "One day, a boy found a shiny stone.",
)


@dataclass(frozen=True, slots=True)
class Said:
    """What was seen of one engine."""

    contents: list[Any]
    """Of all answers: texts, finish reasons, token counts."""
    preemptions: int
    hosts: list[str]
    """Of the scheduler, and of all ranks."""
    node_ids: list[str]
    local_sockets: int
    """Of links that only one machine can use."""
    listening: list[str]
    """Addresses on which the engine listens, in its range of ports."""
    held_blocks: int


def observe(app: Any) -> Said:
    from tests.support.asking import ask_all
    from tests.support.engines import status_of

    work: list[tuple[str, dict[str, Any]]] = []
    for number, prompt in enumerate(PROMPTS * 2):
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": 60, "stream": number % 2 == 0}
        body |= {"temperature": 0} if number < len(PROMPTS) else {"seed": number, "top_p": 0.9}
        work.append(("/v1/completions", {**body, "ignore_eos": True}))
    answers = ask_all(app.url, work)
    app.wait_idle()
    status = asyncio.run(status_of(app.name))
    assert status.scheduler is not None
    assert status.scheduler.counters is not None
    assert status.scheduler_place is not None
    places = [status.scheduler_place, *status.places]
    return Said(
        contents=[answer.content for answer in answers],
        preemptions=sum(status.scheduler.counters.preemptions.values()),
        hosts=[place.host for place in places],
        node_ids=[place.node_id for place in places],
        **sockets_of([place.process_id for place in places], app.config.parallel),
        held_blocks=status.scheduler.counters.held_blocks,
    )


def sockets_of(process_ids: list[int], parallel: Any) -> dict[str, Any]:
    """How these processes can be reached."""
    import psutil

    ports = range(parallel.first_port, parallel.last_port + 1)
    num_local, listening = 0, set()
    for process_id in process_ids:
        for socket in psutil.Process(process_id).net_connections("all"):
            if isinstance(socket.laddr, str):
                num_local += "palimpsest-" in socket.laddr
            elif socket.status == psutil.CONN_LISTEN and socket.laddr.port in ports:
                listening.add(str(socket.laddr.ip))
    return {"local_sockets": num_local, "listening": sorted(listening)}


def run(model: Path) -> dict[str, Said]:
    from tests.support.served_model import ready_to_serve
    from tests.support.serving import deployed, free_port, serve_on

    with tempfile.TemporaryDirectory() as folder, ray_nodes(HOSTS):
        directory = ready_to_serve(model, Path(folder))
        port = free_port()
        common = (
            f"model.model={directory}",
            "model.dtype=float32",
            f"cache.num_blocks={NUM_BLOCKS}",
        )
        over_three = ("parallel.pipeline_parallel_size=3", "parallel.cpus_per_rank=1")
        with serve_on(port):
            with deployed("alone", port, *common) as app:
                alone = observe(app)
            with deployed("three", port, *common, *over_three) as app:
                three = observe(app)
        return {"alone": alone, "three": three}


def main() -> None:
    before = Leftovers.now()
    set_environment()
    said = run(Path(sys.argv[1]))
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while (left := Leftovers.now().processes - before.processes) and time.monotonic() < deadline:
        time.sleep(0.2)
    answer = {name: asdict(one) for name, one in said.items()} | {"left": sorted(left)}
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
