"""`palimpsest bench`: put load on any OpenAI server, and see what its clients would see."""

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cluster.bench_options import (
    ApiKeyFile,
    BenchEndpoint,
    Burstiness,
    Concurrency,
    Endpoint,
    Goodput,
    IgnoreEos,
    InputTokens,
    JsonFile,
    Model,
    NumPrefixes,
    NumRequests,
    OutputTokens,
    Percentiles,
    PrefixTokens,
    PromptFile,
    RequestRate,
    Seed,
    Speed,
    Spread,
    Temperature,
    TraceFile,
    Url,
    VocabSize,
    Warmup,
    read_key,
    write_figures,
)
from cluster.errors import CommandError

if TYPE_CHECKING:
    from cluster.bench_client import Outcome
    from cluster.bench_load import LoadResult, Pace
    from cluster.bench_prompts import BenchRequest, RandomPrompts


def bench(
    url: Url = "http://127.0.0.1:8000",
    model: Model = None,
    endpoint: Endpoint = "completions",
    api_key_file: ApiKeyFile = None,
    num_requests: NumRequests = 100,
    input_tokens: InputTokens = 128,
    output_tokens: OutputTokens = 128,
    spread: Spread = 0,
    prefix_tokens: PrefixTokens = 0,
    num_prefixes: NumPrefixes = 1,
    vocab_size: VocabSize = 500,
    file: PromptFile = None,
    trace: TraceFile = None,
    speed: Speed = 1,
    ignore_eos: IgnoreEos = None,
    temperature: Temperature = 0,
    seed: Seed = 0,
    concurrency: Concurrency = None,
    request_rate: RequestRate = None,
    burstiness: Burstiness = 1,
    warmup: Warmup = 1,
    goodput: Goodput = None,
    percentiles: Percentiles = "50,90,99",
    as_json: JsonFile = None,
) -> None:
    """Put load on a server with the OpenAI API, and see what its clients would see.

    Two kinds of load answer two questions. With --concurrency there is always the same number of
    requests under way, and the throughput is the answer. With --request-rate requests come
    whether or not the server keeps up, and the latencies are the answer: above its capacity they
    grow without end. Without either all requests come at once.

    TTFT is the time to the first token, TPOT the time per output token after it, ITL the time
    between two pieces of a stream (a preemption is one long ITL), E2E that of the whole request.

    Examples:

      palimpsest bench --concurrency 8

      palimpsest bench --url http://10.0.0.5:8000 --request-rate 4 -n 400
      --goodput ttft=500 --goodput tpot=50

      palimpsest bench -c 32 --input-tokens 1500 --prefix-tokens 1000 --num-prefixes 4

      palimpsest bench --trace conversation_trace.jsonl.gz -n 200 --speed 0.1 --json figures.json

      palimpsest bench --endpoint chat --file questions.jsonl -c 4
    """
    from cluster.bench_load import Pace
    from cluster.bench_prompts import RandomPrompts
    from cluster.bench_report import print_result, summarize

    _check_above_zero("--speed", speed)
    _check_above_zero("--burstiness", burstiness)
    if request_rate is not None:
        _check_above_zero("--request-rate", request_rate)
    limits_ms, cuts = _limits(goodput or ()), _percentiles(percentiles)
    made_up = RandomPrompts(
        input_tokens, output_tokens, vocab_size, prefix_tokens, num_prefixes, spread
    )
    source = _Source(endpoint, file, trace, speed, made_up, seed)
    fields: dict[str, Any] = {"temperature": temperature}
    if ignore_eos or (ignore_eos is None and file is None):
        fields["ignore_eos"] = True
    target = _Target(url.rstrip("/"), endpoint, model, read_key(api_key_file), fields)
    requests = source.requests(num_requests + warmup)
    first, requests = requests[num_requests:], requests[:num_requests]
    pace = Pace(request_rate, burstiness, concurrency)
    load = asyncio.run(_run(target, first, requests, pace, seed))
    result = summarize(load, limits_ms=limits_ms, percentiles=cuts)
    print_result(result, Console())
    if as_json is not None:
        write_figures(as_json, {"url": target.url, "seed": seed, **result.as_json()})
    if not result.completed:
        raise CommandError("Not one request was answered in full; the errors are above.")


@dataclass(frozen=True, slots=True)
class _Source:
    """Where the requests come from."""

    endpoint: BenchEndpoint
    file: Path | None
    trace: Path | None
    speed: float
    made_up: "RandomPrompts"
    seed: int

    def requests(self, count: int) -> "list[BenchRequest]":
        """So many, or all that a trace has. Raises CommandError."""
        from cluster.bench_prompts import file_requests, random_requests, trace_requests

        wanted = self.made_up
        if self.file is not None and self.trace is not None:
            raise CommandError(
                "--file and --trace are two sources of prompts: leave one of them out."
            )
        if self.file is not None:
            return file_requests(self.file, count, wanted.output_tokens)
        if self.trace is not None:
            if self.endpoint == "chat":
                raise CommandError(
                    "A trace is played with token ids, which chats do not take: leave --endpoint "
                    "out."
                )
            return trace_requests(
                self.trace, limit=count, speed=self.speed, vocab_size=wanted.vocab_size
            )
        if wanted.prefix_tokens >= wanted.input_tokens:
            raise CommandError(
                f"--prefix-tokens is {wanted.prefix_tokens}, but must be below --input-tokens, "
                f"which is {wanted.input_tokens}."
            )
        return random_requests(wanted, count, self.endpoint, self.seed)


@dataclass(frozen=True, slots=True)
class _Target:
    url: str
    endpoint: BenchEndpoint
    model: str | None
    api_key: str | None
    fields: dict[str, Any]


async def _run(
    target: _Target,
    first: "Sequence[BenchRequest]",
    requests: "Sequence[BenchRequest]",
    pace: "Pace",
    seed: int,
) -> "LoadResult":
    """Send the `first` one by one, which also tells before the long wait whether the server takes
    such requests, and then the others."""
    from cluster.bench_client import BenchClient, first_model, open_session
    from cluster.bench_load import run_load

    async with open_session(target.api_key) as session:
        model = target.model or await first_model(session, target.url)
        client = BenchClient(session, target.url, target.endpoint, model, target.fields)
        for request in first:
            outcome = await client.ask(request)
            if outcome.error is not None:
                raise CommandError(f"The first request failed: {outcome.error.rstrip('.')}.")
        with _progress(len(requests)) as on_end:
            return await run_load(client, requests, pace, seed=seed, on_end=on_end)


@contextmanager
def _progress(num_requests: int) -> "Iterator[Callable[[Outcome], None]]":
    """A bar on a terminal, nothing elsewhere; what is yielded takes each outcome."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]}"),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("requests", total=num_requests, failed="")
        num_failed = 0

        def on_end(outcome: "Outcome") -> None:
            nonlocal num_failed
            num_failed += outcome.error is not None
            failed = f"{num_failed} failed" if num_failed else ""
            bar.update(task, advance=1, failed=failed)

        yield on_end


def _limits(given: Sequence[str]) -> dict[str, float]:
    from cluster.bench_report import LIMITED

    limits = {}
    for text in given:
        name, _, value = text.partition("=")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = math.nan
        if name not in LIMITED or not limits[name] > 0:
            raise CommandError(
                f"--goodput is {text!r}, but must be NAME=MS with a NAME of {', '.join(LIMITED)} "
                f"and a number of milliseconds above 0."
            )
    return limits


def _percentiles(text: str) -> list[float]:
    try:
        cuts = [float(part) for part in text.split(",")]
    except ValueError:
        cuts = [math.nan]
    if not all(0 <= cut <= 100 for cut in cuts):
        raise CommandError(
            f"--percentiles is {text!r}, but must be numbers from 0 to 100, as in 50,90,99."
        )
    return cuts


def _check_above_zero(option: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise CommandError(f"{option} is {value:g}, but must be a number above 0.")
