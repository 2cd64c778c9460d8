"""`palimpsest bench` against a real HTTP server: what it counts is what was served."""

import asyncio
import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from cluster.bench_client import Outcome
from cluster.bench_load import LoadResult
from cluster.bench_report import is_within, summarize
from cluster.cli import main
from tests.support.http_server import MODEL, HttpServer, http_server
from tests.support.metrics import Scrape, scrape


@pytest.fixture(scope="module")
def tight() -> Iterator[HttpServer]:
    """Small enough that four requests of 70 tokens preempt each other."""
    with http_server(num_blocks=14, step_seconds=0.001) as running:
        yield running


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of the command."""
    monkeypatch.setattr(sys, "argv", ["palimpsest", "bench", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def bench(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, url: str, *arguments: str
) -> dict[str, Any]:
    figures = tmp_path / "figures.json"
    assert run(monkeypatch, "--url", url, "--json", str(figures), *arguments) == 0
    found: dict[str, Any] = json.loads(figures.read_text())
    return found


def grown(after: Scrape, before: Scrape, name: str) -> float:
    return after.value(name) - before.value(name)


def test_counts_are_those_of_the_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tight: HttpServer
) -> None:
    before = scrape(tight.url, MODEL)
    sizes = ("-n", "24", "-c", "4", "--input-tokens", "30", "--output-tokens", "40")
    shared = ("--prefix-tokens", "20", "--vocab-size", "256")
    found = bench(monkeypatch, tmp_path, tight.url, *sizes, *shared)
    after = scrape(tight.url, MODEL)
    assert (found["completed"], found["failed"], found["errors"]) == (24, 0, {})
    assert found["prompt_tokens"] == 24 * 30
    assert found["output_tokens"] == 24 * 40
    # And one to warm up.
    assert grown(after, before, "prompt_tokens_total") == 25 * 30
    assert grown(after, before, "generation_tokens_total") == 25 * 40
    preemptions = after.by_label("preemptions_total")["blocks"]
    assert found["preemptions"] == preemptions > 0
    assert found["stalled_ms"] > 0
    assert found["cached_tokens"] >= 24 * 16
    rate = found["output_tokens"] / found["duration_seconds"]
    assert found["output_tokens_per_second"] == pytest.approx(rate)
    for name in ("ttft", "tpot", "itl", "e2e"):
        spread = found["latencies_ms"][name]["percentiles"]
        assert 0 <= spread["p50"] <= spread["p90"] <= spread["p99"], name


def test_chats_from_a_file_end_where_the_model_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, server: HttpServer
) -> None:
    """The model repeats its prompt, and then says that it has ended."""
    texts = ["the cat sat on the mat", "a dog", "it was warm"]
    path = tmp_path / "prompts"
    path.write_text("\n".join(texts))
    arguments = ("--endpoint", "chat", "--file", str(path), "-n", "6", "--output-tokens", "90")
    found = bench(monkeypatch, tmp_path, server.url, *arguments, "--request-rate", "200")
    assert found["completed"] == 6
    assert found["output_tokens"] == 2 * sum(len(server.encode(text)) + 1 for text in texts)


def test_a_trace_is_played(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, server: HttpServer
) -> None:
    rows = [{"prompt_tokens": 5 + i, "output_tokens": 1 + i} for i in range(4)]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(row | {"arrival_seconds": 0.02}) for row in rows))
    arguments = ("--trace", str(path), "-n", "9", "--vocab-size", "200", "--warmup", "0")
    found = bench(monkeypatch, tmp_path, server.url, *arguments, "--goodput", "ttft=60000")
    assert (found["completed"], found["prompt_tokens"], found["output_tokens"]) == (4, 26, 10)
    assert found["goodput_requests_per_second"] == found["requests_per_second"]
    assert "tpot" in found["latencies_ms"]


def test_what_a_server_refuses_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], server: HttpServer
) -> None:
    """The first request fails with the server's own words, before the long wait."""
    arguments = ("--url", server.url, "--input-tokens", "5000", "--vocab-size", "200")
    assert run(monkeypatch, *arguments) == 2
    assert "maximum context length is 2048" in capsys.readouterr().err
    assert run(monkeypatch, *arguments, "--warmup", "0", "-n", "3") == 2
    told = capsys.readouterr()
    assert "3 x HTTP 400" in told.out
    assert "Not one request" in told.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "http://127.0.0.1:9"], "No server answers at http://127.0.0.1:9"),
        (["--goodput", "ttft"], "--goodput is 'ttft', but must be NAME=MS"),
        (["--goodput", "itl=5"], "with a NAME of ttft, tpot, e2e"),
        (["--percentiles", "50,101"], "numbers from 0 to 100"),
        (["--request-rate", "0"], "--request-rate is 0, but must be a number above 0"),
        (["--prefix-tokens", "128"], "--prefix-tokens is 128, but must be below --input-tokens"),
        (["--file", "a", "--trace", "b"], "two sources of prompts"),
        (["--trace", "b", "--endpoint", "chat"], "which chats do not take"),
        (["--file", "missing"], "Cannot read the prompts in missing"),
    ],
)
def test_mistakes_are_told_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    assert run(monkeypatch, *arguments) == 2
    told = capsys.readouterr().err
    assert message in told
    assert "Traceback" not in told


# -- figures ----------------------------------------------------------------------------


def outcome(*token_seconds: float, output_tokens: int | None = None) -> Outcome:
    return Outcome(10.0, list(token_seconds), prompt_tokens=3, output_tokens=output_tokens)


def test_figures_of_a_known_load() -> None:
    fast = outcome(10.1, 10.2, 10.4)
    slow = outcome(10.5, 11.5, output_tokens=5)  # a piece may hold several tokens
    failed = Outcome(10.0, [10.1], error="it broke")
    load = LoadResult([fast, slow, failed], duration_seconds=2.0)
    result = summarize(load, limits_ms={"ttft": 200, "tpot": 200}, percentiles=[50])
    assert (result.completed, result.failed, result.errors) == (2, 1, {"it broke": 1})
    assert (result.prompt_tokens, result.output_tokens) == (6, 8)
    assert (result.requests_per_second, result.output_tokens_per_second) == (1.0, 4.0)
    assert result.goodput_requests_per_second == 0.5
    means = {name: spread.mean for name, spread in result.latencies_ms.items()}
    assert means == pytest.approx(
        {"ttft": 300.0, "tpot": (150 + 250) / 2, "itl": (100 + 200 + 1000) / 3, "e2e": 950.0}
    )
    assert result.latencies_ms["e2e"].percentiles == {"p50": pytest.approx(950.0)}


def test_one_token_keeps_within_any_time_per_token() -> None:
    assert is_within(outcome(10.1), {"tpot": 0.001})
    assert not is_within(outcome(10.1), {"tpot": 0.001, "e2e": 99.0})


# -- other servers ----------------------------------------------------------------------


def test_a_server_that_breaks_off_or_counts_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every third stream breaks off, every third ends in an error, the others say no usage."""
    url, stop = odd_server()
    try:
        arguments = ("-n", "9", "-c", "1", "--warmup", "0", "--model", "odd")
        found = bench(monkeypatch, tmp_path, url, *arguments)
    finally:
        stop()
    assert (found["completed"], found["failed"]) == (3, 6)
    assert found["output_tokens"] == 3 * 4
    assert found["errors"] == {"the stream broke off": 3, "out of luck": 3}


def odd_server() -> tuple[str, Callable[[], None]]:
    num_requests = 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal num_requests
        kind, num_requests = num_requests % 3, num_requests + 1
        await request.read()
        stream = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await stream.prepare(request)
        for _ in range(4):
            await stream.write(b': comment\r\n\r\ndata: {"choices": [{"text": "x"}]}\r\n\r\n')
        if kind == 0:
            await stream.write(b"data: [DONE]\n\n")
        elif kind == 1:
            await stream.write(b'data: {"error": {"message": "out of luck"}}\n\ndata: [DONE]\n\n')
        return stream

    loop = asyncio.new_event_loop()
    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    runner = web.AppRunner(app)
    loop.run_until_complete(runner.setup())
    site = web.TCPSite(runner, "127.0.0.1", 0)
    loop.run_until_complete(site.start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def stop() -> None:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    return f"http://127.0.0.1:{runner.addresses[0][1]}", stop
