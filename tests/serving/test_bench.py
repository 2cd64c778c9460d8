"""`palimpsest bench` against a real HTTP server: what it counts is what was served."""

import asyncio
import itertools
import json
import signal
import sys
import threading
from collections.abc import Iterator
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
from tests.support.scripted_server import scripted_server, send_stream


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
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    url: str,
    *arguments: str,
    exit_code: int = 0,
) -> dict[str, Any]:
    figures = tmp_path / "figures.json"
    assert run(monkeypatch, "--url", url, "--json", str(figures), *arguments) == exit_code
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
    assert (found["cut_off"], found["without_usage"]) == (0, 0)
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
    assert found["load"] == {
        "endpoint": "completions",
        "ignore_eos": True,
        "temperature": 0,
        "model": MODEL,
        "num_requests": 24,
        "requests_per_second": None,
        "burstiness": 1,
        "concurrency": 4,
        "prompts": {
            "input_tokens": 30,
            "output_tokens": 40,
            "vocab_size": 256,
            "prefix_tokens": 20,
            "num_prefixes": 1,
            "spread": 0,
        },
        "seed": 0,
        "limits_ms": {},
    }


def test_chats_from_a_file_end_where_the_model_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, server: HttpServer
) -> None:
    """The model repeats its prompt, and then says that it has ended."""
    texts = ["the cat sat on the mat", "a dog", "it was warm"]
    path = tmp_path / "prompts"
    path.write_text("\n".join(texts))
    arguments = ("--endpoint", "chat", "--file", str(path), "-n", "6", "--output-tokens", "90")
    base_url = f"{server.url}/v1/"
    found = bench(monkeypatch, tmp_path, base_url, *arguments, "--request-rate", "200")
    assert (found["url"], found["completed"]) == (server.url, 6)
    assert found["load"]["prompts"] == {"file": str(path), "output_tokens": 90}
    assert found["load"]["requests_per_second"] == 200
    assert (found["load"]["endpoint"], found["load"]["ignore_eos"]) == ("chat", False)
    assert found["output_tokens"] == 2 * sum(len(server.encode(text)) + 1 for text in texts)


def test_a_trace_is_played(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, server: HttpServer
) -> None:
    """Its first request is also the one to warm up, as it has no more than are asked for."""
    rows = [{"prompt_tokens": 5 + i, "output_tokens": 1 + i} for i in range(4)]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(row | {"arrival_seconds": 0.02}) for row in rows))
    before = scrape(server.url, MODEL)
    arguments = ("--trace", str(path), "-n", "4", "--vocab-size", "200")
    found = bench(monkeypatch, tmp_path, server.url, *arguments, "--goodput", "ttft=60000")
    assert grown(scrape(server.url, MODEL), before, "prompt_tokens_total") == 26 + 5
    assert (found["completed"], found["prompt_tokens"], found["output_tokens"]) == (4, 26, 10)
    assert found["goodput_requests_per_second"] == found["requests_per_second"]
    assert "tpot" in found["latencies_ms"]
    assert found["load"]["num_requests"] == 4
    assert found["load"]["limits_ms"] == {"ttft": 60_000}
    assert found["load"]["prompts"] == {"trace": str(path), "speed": 1, "vocab_size": 200}


def test_what_a_server_refuses_is_told(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    server: HttpServer,
) -> None:
    """The first request fails with the server's own words, before the long wait."""
    arguments = ("--url", server.url, "--input-tokens", "5000", "--vocab-size", "200")
    figures = tmp_path / "figures.json"
    assert run(monkeypatch, *arguments, "--json", str(figures)) == 2
    assert "maximum context length is 2048" in capsys.readouterr().err
    assert not figures.exists()
    assert run(monkeypatch, *arguments, "--warmup", "0", "-n", "3") == 1
    assert "3 x HTTP 400" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "http://127.0.0.1:9"], "No server answers at http://127.0.0.1:9"),
        (["--goodput", "ttft"], "--goodput is 'ttft', but must be NAME=MS"),
        (["--goodput", "itl=5"], "with a NAME of ttft, tpot, e2e"),
        (["--percentiles", "50,101"], "numbers from 0 to 100"),
        (["--request-rate", "0"], "--request-rate is 0, but must be a number above 0"),
        (["--timeout", "0"], "--timeout is 0, but must be a number above 0"),
        (["--request-rate", "1", "--trace", "b"], "two sources of send times"),
        (["--burstiness", "2"], "--burstiness is that of a --request-rate"),
        (["--speed", "2"], "--speed is that of a --trace"),
        (["--prefix-tokens", "128"], "--prefix-tokens is 128, but must be below --input-tokens"),
        (["--file", "a", "--trace", "b"], "two sources of prompts"),
        (["--trace", "b", "--endpoint", "chat"], "which chats do not take"),
        (["--file", "missing"], "Cannot read the prompts in missing"),
        (["--file", "a", "--spread", "0.5"], "--spread is that of made-up prompts"),
        (["--trace", "b", "--output-tokens", "5"], "--output-tokens is that of made-up prompts"),
        (["--output-tokens", f"{10**20}"], "Invalid value for '--output-tokens'"),
        (["--vocab-size", f"{1 << 31}"], "Invalid value for '--vocab-size'"),
        (["--json", "/nope/x"], "Cannot write the figures to /nope/x: is /nope there"),
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


@pytest.mark.parametrize(
    ("key", "message"), [(b"\xff", "it is no UTF-8 text"), (b"a\nb\n", "must be one line")]
)
def test_a_key_must_fit_into_a_header(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    key: bytes,
    message: str,
) -> None:
    path = tmp_path / "key"
    path.write_bytes(key)
    assert run(monkeypatch, "--api-key-file", str(path)) == 2
    assert message in capsys.readouterr().err


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

ONCE = ("--warmup", "0", "--model", "odd")
PIECE = b': comment\r\n\r\ndata: {"choices": [{"text": "x"}]}\r\n\r\n'
FAILURE = b'data: {"error": {"message": "out of luck"}}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.fixture
def unlucky() -> Iterator[str]:
    """Every third stream breaks off, every third ends in an error, the others say no usage."""
    ends = itertools.cycle([(DONE,), (FAILURE, DONE), ()])
    with scripted_server(lambda got: send_stream(got, *[PIECE] * 4, *next(ends))) as url:
        yield url


def test_a_server_that_breaks_off_or_counts_nothing(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    unlucky: str,
) -> None:
    found = bench(monkeypatch, tmp_path, unlucky, *ONCE, "-n", "9", "-c", "1", exit_code=1)
    assert (found["completed"], found["failed"], found["without_usage"]) == (3, 6, 3)
    assert (found["prompt_tokens"], found["output_tokens"]) == (3 * 128, 3 * 4)
    assert found["errors"] == {"the stream broke off": 3, "out of luck": 3}
    assert row(capsys.readouterr().out, "answers without usage, so these are estimates") == "3"


def test_a_bar_counts_on_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], unlucky: str
) -> None:
    arguments = ("--url", unlucky, *ONCE, "-n", "3", "-c", "1")
    assert run(monkeypatch, *arguments) == 1
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert run(monkeypatch, *arguments) == 1
    shown = capsys.readouterr().err
    assert "3/3" in shown
    assert "2 failed" in shown


def test_a_server_that_hangs_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before its first byte, or after some."""
    hangs = itertools.cycle([(), (PIECE,)])

    async def hang(request: web.BaseRequest) -> web.StreamResponse:
        pieces = next(hangs)
        if pieces:
            await send_stream(request, *pieces)
        return await asyncio.Future()

    with scripted_server(hang) as url:
        assert run(monkeypatch, "--url", url, *ONCE, "-n", "2", "--timeout", "0.2") == 1
    assert "2 x no byte came for 0.2 s" in capsys.readouterr().out


@pytest.mark.parametrize("is_trace", [False, True])
def test_an_interrupted_load_tells_what_it_has_seen(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    is_trace: bool,
) -> None:
    """The fourth and the fifth request hang, and then Ctrl-C is pressed. The others wait for a
    place, or in a trace for their time."""
    trace = tmp_path / "trace.jsonl"
    lengths = {"prompt_tokens": 5, "output_tokens": 5}
    rows = [lengths | {"arrival_seconds": seconds} for seconds in [0] * 5 + [3600] * 4]
    trace.write_text("\n".join(json.dumps(row) for row in rows))
    numbers = itertools.count(1)
    main_thread = threading.main_thread().ident
    assert main_thread is not None

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        number = next(numbers)
        if number <= 3:
            return await send_stream(request, PIECE, DONE)
        if number == 5:
            signal.pthread_kill(main_thread, signal.SIGINT)
        return await asyncio.Future()

    figures = tmp_path / "figures.json"
    arguments = [*ONCE, "-n", "9", "-c", "2", "--json", str(figures)]
    arguments += ["--trace", str(trace)] if is_trace else []
    # It is ignored where the tests themselves run in the background of a shell.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with scripted_server(answer) as url:
            assert run(monkeypatch, "--url", url, *arguments) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    found = json.loads(figures.read_text())
    assert (found["completed"], found["failed"], found["cut_off"]) == (3, 0, 2)
    assert found["load"]["num_requests"] == 9
    assert row(capsys.readouterr().out, "requests that were cut off") == "2"


def row(printed: str, name: str) -> str:
    """The value beside this name in the table."""
    (line,) = (line for line in printed.splitlines() if line.strip().startswith(name))
    return line.strip().removeprefix(name).strip()
