"""Two servers under the same load in turn, on the same machine in the same minutes.

python -m tests.benchmarks.side_by_side \\
    --ours "palimpsest serve --port 8100" --ours-url http://127.0.0.1:8100 \\
    --peer "vllm serve MODEL --port 8200"  --peer-url http://127.0.0.1:8200 --out table.md

Both stay up and the load alternates, A B A B, so that what else happens on the machine happens to
both; each ratio is of two runs side by side, and the median and the range of the ratios are told.
An idle server that is not idle would slow the other down, so its CPU time is measured as well.

A command is started and ended here. Without one the server at the URL is used as it is, and a
process id (`--ours-pid`) says whose CPU time to watch.
"""

import argparse
import asyncio
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import aiohttp
import psutil

from cluster.bench_client import BenchClient
from cluster.bench_load import Pace, run_load
from cluster.bench_prompts import BenchRequest, RandomPrompts, random_requests
from cluster.bench_report import BenchResult, summarize

_START_SECONDS = 400.0
_STOP_SECONDS = 60.0
_SETTLE_SECONDS = 1.0
_MAX_IDLE_CORES = 0.05
"""More CPU than that, and the idle server is told to disturb the other."""


@dataclass(frozen=True, slots=True)
class Scenario:
    input_tokens: int
    output_tokens: int
    concurrency: int
    num_requests: int

    @classmethod
    def parse(cls, text: str) -> "Scenario":
        """`INPUT/OUTPUT/CONCURRENCY/REQUESTS`."""
        return cls(*map(int, text.split("/")))

    def __str__(self) -> str:
        return f"{self.input_tokens} in, {self.output_tokens} out, {self.concurrency} at a time"

    def requests(self, seed: int, vocab_size: int) -> list[BenchRequest]:
        prompts = RandomPrompts(self.input_tokens, self.output_tokens, vocab_size)
        return random_requests(prompts, self.num_requests, "completions", seed)


DEFAULT_SCENARIOS = ("128/128/1/2", "128/128/8/8", "128/128/32/32", "1500/4/4/8")


@dataclass(frozen=True, slots=True)
class Server:
    name: str
    url: str
    process_id: int | None

    def cpu_seconds(self) -> float | None:
        """What its processes have used so far; None: nobody knows which they are."""
        if self.process_id is None:
            return None
        root = psutil.Process(self.process_id)
        used = 0.0
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                used += times.user + times.system
        return used


@dataclass(frozen=True, slots=True)
class Run:
    """One server under one scenario, while the other was idle."""

    server: str
    scenario: Scenario
    round_number: int
    idle_cores: float | None
    """CPU seconds per second of the idle server."""
    result: BenchResult

    @property
    def tokens_per_second(self) -> float:
        """Prompts count where they are what is measured."""
        few = self.scenario.output_tokens < self.scenario.input_tokens // 10
        rates = self.result
        return rates.total_tokens_per_second if few else rates.output_tokens_per_second


@contextlib.contextmanager
def running(name: str, url: str, command: str | None, process_id: int | None) -> Iterator[Server]:
    """A server that answers; one with a command is ended with all its processes."""
    if command is None:
        wait_ready(url, None)
        yield Server(name, url, process_id)
        return
    with (
        Path(f"{name}.log").open("wb") as log,
        subprocess.Popen(
            shlex.split(command), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        ) as process,
    ):
        try:
            wait_ready(url, process)
            yield Server(name, url, process.pid)
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def wait_ready(url: str, process: "subprocess.Popen[bytes] | None") -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            for path in ("/health", "/v1/models"):
                urllib.request.urlopen(url + path, timeout=5).close()
        except OSError as error:
            if time.monotonic() > deadline or (process is not None and process.poll() is not None):
                raise SystemExit(f"{url} does not answer: {error}") from error
            time.sleep(1)
        else:
            return


async def ask(server: Server, requests: Sequence[BenchRequest], concurrency: int) -> BenchResult:
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        async with session.get(f"{server.url}/v1/models") as answer:
            model = (await answer.json())["data"][0]["id"]
        fields = {"temperature": 0, "ignore_eos": True}
        client = BenchClient(session, server.url, "completions", model, fields)
        load = await run_load(client, requests, Pace(concurrency=concurrency), seed=0)
    return summarize(load, limits_ms={}, percentiles=[50, 99])


def measure(busy: Server, idle: Server, scenario: Scenario, seed: int, vocab_size: int) -> Run:
    time.sleep(_SETTLE_SECONDS)
    before, began = idle.cpu_seconds(), time.monotonic()
    requests = scenario.requests(seed, vocab_size)
    result = asyncio.run(ask(busy, requests, scenario.concurrency))
    after, seconds = idle.cpu_seconds(), time.monotonic() - began
    if result.failed:
        raise SystemExit(f"{busy.name} failed {result.failed} requests: {result.errors}")
    idle_cores = None if before is None or after is None else (after - before) / seconds
    return Run(busy.name, scenario, seed, idle_cores, result)


def compare(
    ours: Server, peer: Server, scenarios: Sequence[Scenario], rounds: int, vocab_size: int
) -> list[Run]:
    """One round over all scenarios after the other, and before them a few requests to warm up."""
    warm_up = [replace(s, output_tokens=2, concurrency=1, num_requests=1) for s in scenarios]
    runs = []
    for number, round_of in enumerate([warm_up, *[scenarios] * rounds]):
        for scenario in round_of:
            for busy, idle in ((ours, peer), (peer, ours)):
                run = measure(busy, idle, scenario, number, vocab_size)
                told = f"{run.tokens_per_second:.1f} tokens/s"
                print(f"round {number}, {scenario}: {busy.name} {told}", file=sys.stderr)
                if number:
                    runs.append(run)
    return runs


def table(runs: Sequence[Run], ours: str, peer: str) -> str:
    """Markdown: medians and ranges over the rounds."""
    lines = [
        f"| tokens/s (median, range) | {ours} | {peer} | ratio | "
        f"TTFT p50, ms | TPOT p50, ms | idle CPU, cores |",
        "|---|---|---|---|---|---|---|",
    ]
    for scenario in dict.fromkeys(run.scenario for run in runs):
        mine, theirs = (
            [run for run in runs if run.scenario == scenario and run.server == name]
            for name in (ours, peer)
        )
        ratios = [
            a.tokens_per_second / b.tokens_per_second for a, b in zip(mine, theirs, strict=True)
        ]
        cells = (
            str(scenario),
            spread([run.tokens_per_second for run in mine], 1),
            spread([run.tokens_per_second for run in theirs], 1),
            f"**{spread(ratios, 2)}**",
            " / ".join(latency(part, "ttft") for part in (mine, theirs)),
            " / ".join(latency(part, "tpot") for part in (mine, theirs)),
            idle_text([*mine, *theirs]),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def spread(values: Sequence[float], digits: int) -> str:
    low, high = min(values), max(values)
    return f"{median(values):.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def latency(runs: Sequence[Run], name: str) -> str:
    found = [run.result.latencies_ms.get(name) for run in runs]
    values = [one.percentiles["p50"] for one in found if one is not None]
    return f"{median(values):.0f}" if values else "-"


def idle_text(runs: Sequence[Run]) -> str:
    known = [run.idle_cores for run in runs if run.idle_cores is not None]
    if len(known) < len(runs):
        return "not watched"
    worst = max(known)
    return f"{worst:.2f}" if worst <= _MAX_IDLE_CORES else f"{worst:.2f}, disturbed"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.side_by_side")
    for name, port in (("ours", 8100), ("peer", 8200)):
        parser.add_argument(f"--{name}", metavar="COMMAND", help="started and ended here")
        parser.add_argument(f"--{name}-url", default=f"http://127.0.0.1:{port}")
        parser.add_argument(f"--{name}-pid", type=int, help="of a server without command")
    parser.add_argument("--peer-name", default="peer", help="in the table")
    parser.add_argument("--scenario", action="append", metavar="IN/OUT/CONCURRENCY/REQUESTS")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vocab-size", type=int, default=49_000)
    parser.add_argument("--out", type=Path, help="the table in Markdown")
    parser.add_argument("--json", type=Path, help="all single runs")
    options = parser.parse_args()
    scenarios = [Scenario.parse(text) for text in options.scenario or DEFAULT_SCENARIOS]
    ours_name, peer_name = "palimpsest", options.peer_name
    with (
        running(ours_name, options.ours_url, options.ours, options.ours_pid) as ours,
        running(peer_name, options.peer_url, options.peer, options.peer_pid) as peer,
    ):
        runs = compare(ours, peer, scenarios, options.rounds, options.vocab_size)
    text = table(runs, ours_name, peer_name)
    print(text)
    if options.out is not None:
        options.out.write_text(text)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(run) for run in runs], indent=1) + "\n")


if __name__ == "__main__":
    main()
