"""How long a scrape of `/metrics` takes while many requests run.

python -m tests.benchmarks.metrics_scrape --requests 1000

The server is the real one in this process, over a model that repeats its prompt; the requests are
streams that are read in a process of their own.
"""

import argparse
import asyncio
import multiprocessing
import time
from statistics import median
from typing import Any

import httpx

from configs import load
from tests.support.asking import with_client
from tests.support.http_server import MODEL, http_server
from tests.support.metrics import scrape

GOAL_MS = 20.0


def read_streams(url: str, num_requests: int) -> None:
    body = {"prompt": "the cat sat", "max_tokens": 1500, "ignore_eos": True, "stream": True}

    async def run(client: httpx.AsyncClient) -> None:
        async def one() -> None:
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                async for _ in answer.aiter_raw():
                    pass

        await asyncio.gather(*(one() for _ in range(num_requests)))

    with_client(url, run, timeout_seconds=600)


def measure(url: str, num_scrapes: int) -> list[float]:
    """Milliseconds of each scrape."""
    took_ms = []
    with httpx.Client(base_url=url, timeout=30) as client:
        for _ in range(num_scrapes):
            began = time.perf_counter()
            client.get("/metrics").raise_for_status()
            took_ms.append(1e3 * (time.perf_counter() - began))
            time.sleep(0.1)
    return sorted(took_ms)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.metrics_scrape")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--scrapes", type=int, default=100)
    parser.add_argument("--step-ms", type=float, default=500)
    options = parser.parse_args()
    overrides = [
        f"scheduler.max_num_seqs={options.requests}",
        f"scheduler.max_num_batched_tokens={2 * options.requests}",
    ]
    config = load(overrides=overrides, environ={}).config
    sizes: dict[str, Any] = {"num_blocks": 200_000, "step_seconds": options.step_ms / 1e3}
    with http_server(config, **sizes) as server:
        clients = multiprocessing.get_context("spawn").Process(
            target=read_streams, args=(server.url, options.requests)
        )
        clients.start()
        try:
            while scrape(server.url, MODEL).value("requests_running") < options.requests:
                time.sleep(0.2)
            took_ms = measure(server.url, options.scrapes)
            found = scrape(server.url, MODEL)
        finally:
            clients.terminate()
            clients.join()
    print(
        f"{found.value('requests_running'):.0f} requests run: a scrape takes "
        f"{median(took_ms):.1f} ms in the median, {took_ms[-2]:.1f} ms at most but once, "
        f"{took_ms[-1]:.1f} ms at most"
    )
    print(f"Goal: less than {GOAL_MS:g} ms.")


if __name__ == "__main__":
    main()
