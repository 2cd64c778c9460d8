"""What `/metrics` says, against what the clients of a real server were told."""

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from cluster.asgi import MAX_BODY_WORK, KeyDigests
from cluster.engine_client import EngineClient
from cluster.http_settings import HttpSettings
from configs import load
from scheduler.messages import InterruptionCause
from tests.support.engine import LocalCalls
from tests.support.events import Stream
from tests.support.http_server import MODEL, HttpServer, http_server
from tests.support.metrics import Scrape, assert_bills_add_up, scrape

NUM_REQUESTS = 500
NUM_CONNECTIONS = 32
NUM_BLOCKS = 25


@dataclass
class Record:
    """What the clients were told, added up."""

    finishes: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    prompt_tokens_of_aborted: int = 0
    output_tokens: int = 0
    output_tokens_of_aborted: int = 0
    num_first_tokens: int = 0
    preemptions: int = 0

    def add_usage(self, usage: dict[str, Any]) -> None:
        self.prompt_tokens += usage["prompt_tokens"]
        self.output_tokens += usage["completion_tokens"]
        self.preemptions += usage.get("preemption", {}).get("count", 0)

    def add_finishes(self, finishes: dict[int, str]) -> None:
        self.finishes.update(finishes.values())
        self.num_first_tokens += len(finishes)


def draw_body(rng: random.Random, number: int) -> dict[str, Any]:
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "looked"]
    body: dict[str, Any] = {
        "prompt": " ".join(rng.choices(words, k=rng.randint(2, 12))),
        "max_tokens": rng.randint(1, 60),
        "stream": number % 2 == 0,
    }
    if rng.random() < 0.3:
        body |= {"n": 2, "temperature": 1.0}
    if rng.random() < 0.3:
        body |= {"stop": ["mat", "looked"]}
    if rng.random() < 0.3:
        body |= {"ignore_eos": True}
    return body


async def ask(client: httpx.AsyncClient, body: dict[str, Any], record: Record) -> None:
    if not body["stream"]:
        answer = (await client.post("/v1/completions", json=body)).json()
        record.add_usage(answer["usage"])
        record.add_finishes({c["index"]: c["finish_reason"] for c in answer["choices"]})
        return
    body = {**body, "stream_options": {"include_usage": True}}
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        stream = Stream().read([line async for line in answer.aiter_lines()])
    assert stream.usage is not None
    record.add_usage(stream.usage)
    record.add_finishes(stream.finishes)


async def ask_and_leave(
    client: httpx.AsyncClient, body: dict[str, Any], record: Record, num_chunks: int
) -> None:
    """Leave after so many chunks, of more than there can be by then."""
    options = {"continuous_usage_stats": True}
    body = {**body, "stream": True, "ignore_eos": True, "max_tokens": 330}
    body = {name: value for name, value in body.items() if name not in ("stop", "n")}
    usage = {"prompt_tokens": 0, "completion_tokens": 0}
    async with client.stream(
        "POST", "/v1/completions", json={**body, "stream_options": options}
    ) as answer:
        assert answer.status_code == 200
        lines = answer.aiter_lines()
        while num_chunks and (line := await anext(lines)) != "data: [DONE]":
            if line.startswith("data: {"):
                usage = httpx.Response(200, text=line.removeprefix("data: ")).json()["usage"]
                num_chunks -= 1
    record.finishes["abort"] += 1
    record.output_tokens_of_aborted += usage["completion_tokens"]
    record.prompt_tokens_of_aborted += usage["prompt_tokens"]


def run_clients(url: str, seed: int) -> Record:
    rng, record = random.Random(seed), Record()
    connections = asyncio.Semaphore(NUM_CONNECTIONS)

    async def one(client: httpx.AsyncClient, number: int) -> None:
        body = draw_body(rng, number)
        async with connections:
            if number % 10 == 3:
                await ask_and_leave(client, body, record, num_chunks=1 + number % 7)
            else:
                await ask(client, body, record)

    async def run() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
            await asyncio.gather(*(one(client, number) for number in range(NUM_REQUESTS)))

    asyncio.run(run())
    return record


@pytest.fixture(scope="module")
def busy() -> Iterator[tuple[Record, Scrape, HttpServer]]:
    """500 requests in a pool that is far too small, among them 50 whose clients leave."""
    config = load(overrides=["server.metrics_compat=vllm"], environ={}).config
    settings = HttpSettings(metrics_compat="vllm")
    with http_server(
        config, settings=settings, num_blocks=NUM_BLOCKS, step_seconds=0.001
    ) as server:
        record = run_clients(server.url, seed=5)
        server.wait_idle()
        yield record, scrape(server.url, MODEL), server


def test_requests_and_tokens_are_those_of_the_clients(
    busy: tuple[Record, Scrape, HttpServer],
) -> None:
    record, found, _ = busy
    assert found.by_label("requests_total") == {"error": 0.0, **record.finishes}
    assert record.finishes["abort"] == NUM_REQUESTS // 10
    prompts = found.by_label("request_prompt_tokens_sum")
    outputs = found.by_label("request_generation_tokens_sum")
    assert outputs["stop"] + outputs["length"] == record.output_tokens
    # Who leaves has read no more than was written, and the engine may be a few steps ahead.
    assert prompts["abort"] == record.prompt_tokens_of_aborted
    assert outputs["abort"] >= record.output_tokens_of_aborted > 0
    all_prompts = record.prompt_tokens + record.prompt_tokens_of_aborted
    assert found.value("prompt_tokens_total") == all_prompts
    assert found.value("generation_tokens_total") == sum(outputs.values())


def test_latencies_are_observed_once_each(busy: tuple[Record, Scrape, HttpServer]) -> None:
    record, found, _ = busy
    num_begun = record.num_first_tokens + record.finishes["abort"]
    num_whole = record.finishes["stop"] + record.finishes["length"]
    num_tokens = found.value("generation_tokens_total")
    assert found.value("time_to_first_token_seconds_count") == num_begun
    assert found.value("e2e_request_latency_seconds_count") == num_whole
    assert found.value("inter_token_latency_seconds_count") == num_tokens - num_begun
    assert found.value("request_queue_seconds_count") == num_begun


def test_interruptions_are_billed(busy: tuple[Record, Scrape, HttpServer]) -> None:
    record, found, _ = busy
    preemptions = found.value("preemptions_total", cause="blocks")
    assert preemptions >= record.preemptions > 0
    assert found.value("request_preemptions_sum") == preemptions
    assert_bills_add_up(found, InterruptionCause)
    hits = found.value("resume_cache_hits_total", cause="blocks")
    assert 0 < hits <= found.value("resume_cache_queries_total", cause="blocks")
    assert found.value("preemption_stall_seconds_count", cause="blocks") > 0
    assert found.value("scheduled_tokens_total", kind="recompute") > 0
    assert found.value("kv_blocks_wanted") > NUM_BLOCKS


def test_an_idle_pool_is_whole(busy: tuple[Record, Scrape, HttpServer]) -> None:
    _, found, _ = busy
    blocks = found.by_label("kv_blocks")
    assert blocks["held"] == 0
    assert sum(blocks.values()) == NUM_BLOCKS - 1
    assert found.value("kv_cache_usage_ratio") == 0
    assert found.value("requests_running") == 0
    assert found.by_label("requests_waiting") == {"new": 0, "preempted": 0}
    sizes = {"block_size": "16", "num_blocks": "25", "token_capacity": "384"}
    assert found.value("cache_config_info", **sizes, max_concurrency="0.19") == 1


def test_the_names_of_vllm_mean_the_same(busy: tuple[Record, Scrape, HttpServer]) -> None:
    _, found, server = busy
    for theirs, ours in (
        ("prompt_tokens_total", "prompt_tokens_total"),
        ("generation_tokens_total", "generation_tokens_total"),
        ("prefix_cache_hits_total", "prefix_cache_hits_total"),
        ("time_to_first_token_seconds_count", "time_to_first_token_seconds_count"),
        ("inter_token_latency_seconds_sum", "inter_token_latency_seconds_sum"),
        ("kv_cache_usage_perc", "kv_cache_usage_ratio"),
        ("num_requests_running", "requests_running"),
    ):
        assert found.value(f"vllm:{theirs}") == found.value(ours), theirs
    assert found.value("vllm:num_requests_waiting") == 0
    preemptions = sum(found.by_label("preemptions_total").values())
    assert found.value("vllm:num_preemptions_total") == preemptions
    for reason, count in found.by_label("requests_total").items():
        assert found.value("vllm:request_success_total", finished_reason=reason) == count
    plain = httpx.get(f"{server.url}/metrics").text
    assert plain.startswith("# HELP palimpsest_requests_running")
    wanted = {"accept": "application/openmetrics-text; version=1.0.0"}
    answer = httpx.get(f"{server.url}/metrics", headers=wanted)
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")


def test_refusals_are_counted_by_reason() -> None:
    config = load(
        overrides=["scheduler.max_num_seqs=1", "scheduler.max_waiting_requests=1"], environ={}
    )
    with http_server(config.config, num_blocks=11, step_seconds=0.01) as server:
        long = {"prompt": "the cat sat", "max_tokens": 120, "ignore_eos": True}

        async def crowd() -> list[int]:
            async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
                answers = [client.post("/v1/completions", json=long) for _ in range(5)]
                return [answer.status_code for answer in await asyncio.gather(*answers)]

        statuses = Counter(asyncio.run(crowd()))
        too_long = {**long, "max_tokens": 500}
        assert httpx.post(f"{server.url}/v1/completions", json=too_long).status_code == 400
        found = scrape(server.url, MODEL).by_label("admission_rejections_total")
    assert statuses[429] > 0
    assert found["queue_full"] == statuses[429]
    assert found["never_fits"] == 1
    assert sum(found.values()) == statuses[429] + 1


def test_errors_are_counted_by_status() -> None:
    settings = HttpSettings(api_keys=KeyDigests.of(["right"]))
    with http_server(settings=settings) as server:
        headers = {"authorization": "Bearer right"}
        with httpx.Client(base_url=server.url, headers=headers, timeout=30) as client:
            assert client.post("/v1/completions", json={"prompt": "cat"}).status_code == 200
            assert not scrape(server.url, MODEL).nonzero("http_errors_total")

            assert client.post("/v1/completions", json={}).status_code == 400
            assert client.post("/v1/completions", json={"prompt": []}).status_code == 400
            assert client.post("/v1/completions", content=b"{").status_code == 400
            assert httpx.post(f"{server.url}/v1/completions", json={}).status_code == 401
            assert client.get("/v1/nothing").status_code == 404
            assert client.get("/v1/completions").status_code == 405
            too_much = b"," * (MAX_BODY_WORK + 1)
            assert client.post("/v1/completions", content=too_much).status_code == 413

            server.run(lambda: server.engine.actor.give_up("the workers are lost"))
            assert client.get("/ready").status_code == 503
            body = {"prompt": "the cat"}
            assert client.post("/v1/completions", json=body).status_code == 503
            found = scrape(server.url, MODEL)
    counts = {"400": 3, "401": 1, "404": 1, "405": 1, "413": 1, "503": 1}
    assert found.nonzero("http_errors_total") == counts
    assert found.nonzero("admission_rejections_total") == {"unavailable": 1}


def test_a_second_replica_is_in_the_sum_and_stays_when_it_is_gone(server: HttpServer) -> None:
    before = scrape(server.url, MODEL).value("prompt_tokens_total")

    async def another_replica() -> None:
        client = EngineClient(LocalCalls(server.engine.actor))
        client.start()
        await client.wait_ready(5)
        client.metrics.counts.accepted(1000)
        await client.metrics.everything()
        client.metrics.counts.accepted(1)
        await client.close()

    server.run(another_replica)
    for _ in range(2):
        assert scrape(server.url, MODEL).value("prompt_tokens_total") == before + 1000


def test_without_an_engine_counters_stay_and_gauges_are_absent() -> None:
    with http_server() as server:
        body = {"prompt": "the cat", "max_tokens": 3}
        assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 200
        before = scrape(server.url, MODEL)
        server.run(lambda: server.engine.actor.give_up("the workers are lost"))
        after = scrape(server.url, MODEL)
    assert before.value("requests_running") == 0
    assert not after.fallen_since(before)
    with pytest.raises(KeyError):
        after.value("requests_running")
