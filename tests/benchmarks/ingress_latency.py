"""How long a token takes from the end of its step to the client's socket, through Ray Serve.

python -m tests.benchmarks.ingress_latency --streams 64 --step-ms 50

A model that says the time stands in for a real one (`tests.support.clock_rank`), so what is left is
the way: scheduler, poll, detokenizer, ingress replica, socket. The client reads all
streams in this one process, which is part of what is measured.
"""

import argparse
import asyncio
import contextlib
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import quantiles

import psutil

from cluster.local_ray import own_cluster, start_serve
from tests.support.clock_rank import age_ms, write_clock_model

HOST = "127.0.0.1"
REPOSITORY = Path(__file__).parents[2]


async def read_stream(port: int, num_tokens: int, started: asyncio.Event) -> list[int]:
    """The ages of all tokens of one stream, in milliseconds."""
    reader, writer = await asyncio.open_connection(HOST, port)
    body = json.dumps(
        {"prompt": "1 2 3", "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    await writer.drain()
    ages: list[int] = []
    while True:
        line = await reader.readline()
        if line.startswith(b"data: {"):
            text = line.partition(b'"text":"')[2].partition(b'"')[0]
            ages += [age_ms(word) for word in text.decode().split()]
            started.set()
        elif line.startswith(b"data: [DONE]") or not line:
            break
    writer.close()
    assert len(ages) == num_tokens, f"{len(ages)} tokens of {num_tokens}"
    return ages


async def measure(port: int, num_streams: int, num_tokens: int) -> None:
    started = asyncio.Event()
    began, cpu_before = time.monotonic(), cpu_seconds()
    streams = await asyncio.gather(
        *(read_stream(port, num_tokens, started) for _ in range(num_streams))
    )
    seconds = time.monotonic() - began
    # The first tokens come while requests are still being taken in.
    ages = sorted(age for stream in streams for age in stream[num_tokens // 10 :])
    cuts = quantiles(ages, n=100, method="inclusive")
    used = {name: value - cpu_before.get(name, 0.0) for name, value in cpu_seconds().items()}
    rate = num_streams * num_tokens / seconds
    print(
        f"{num_streams} streams, {rate:.0f} tokens/s: from step to socket "
        f"p50 {cuts[49]:.0f} ms, p90 {cuts[89]:.0f} ms, p99 {cuts[98]:.0f} ms, max {ages[-1]} ms"
    )
    microseconds = {name: 1e6 * value / (num_streams * num_tokens) for name, value in used.items()}
    print(f"  CPU per token, {sum(microseconds.values()):.0f} us in all: ", end="")
    largest = sorted(microseconds.items(), key=lambda item: -item[1])[:6]
    print(", ".join(f"{name} {value:.0f}" for name, value in largest))


def cpu_seconds() -> dict[str, float]:
    """What this process and those under it have used so far, by name."""
    used: dict[str, float] = {}
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            times, name = process.cpu_times(), process.cmdline()[0].rpartition("/")[2][:40]
            used[name] = used.get(name, 0.0) + times.user + times.system
    return used


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.ingress_latency")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--step-ms", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--port", type=int, default=8399)
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = str(REPOSITORY)  # where the workers find the clock
    with tempfile.TemporaryDirectory() as folder, own_cluster(options.port):
        from ray import serve

        from cluster.app import application
        from cluster.engine_spec import EngineSpec
        from cluster.probe import Probe
        from configs import load

        model = write_clock_model(Path(folder), options.step_ms)
        config = load(None, [f"model.model={model}", "scheduler.max_num_seqs=1024"], {}).config
        spec = EngineSpec.of(config, loader="tests.support.clock_rank:load_clock_rank")
        start_serve(HOST, options.port, is_direct=True)
        serve.run(application(config, spec), name="clock")
        probe = Probe(f"http://{HOST}:{options.port}")
        while not (state := probe.state()).is_ready:
            assert not state.has_failed, state.reason
            time.sleep(0.1)
        for _ in range(options.rounds):
            asyncio.run(measure(options.port, options.streams, options.tokens))


if __name__ == "__main__":
    main()
