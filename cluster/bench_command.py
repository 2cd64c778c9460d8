"""`palimpsest bench`: put load on any OpenAI server, and see what its clients would see."""

import asyncio
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
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
    Timeout,
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

_INTERRUPTED = 130
"""The exit code of a program that Ctrl-C has ended, by the custom of shells."""


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
    timeout: Timeout = 600,
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

    The exit code is 0 when no request failed, 1 when any did, 2 when the load could not begin.
    Ctrl-C cuts off what is under way and tells the figures of what has been answered; the exit
    code is then 130.

    Examples:

      palimpsest bench --concurrency 8

      palimpsest bench --url http://10.0.0.5:8000 --request-rate 4 -n 400
      --goodput ttft=500 --goodput tpot=50

      palimpsest bench -c 32 --input-tokens 1500 --prefix-tokens 1000 --num-prefixes 4

      palimpsest bench --trace conversation_trace.jsonl.gz -n 200 --speed 0.1 --json figures.json

      palimpsest bench --endpoint chat --file questions.jsonl -c 4
    """
    from cluster.bench_prompts import RandomPrompts
    from cluster.bench_report import print_result, summarize

    _check_above_zero("--timeout", timeout)
    pace = _pace(request_rate, burstiness, concurrency, trace)
    limits_ms, cuts = _limits(goodput or ()), _percentiles(percentiles)
    made_up = RandomPrompts(
        input_tokens, output_tokens, vocab_size, prefix_tokens, num_prefixes, spread
    )
    source = _Source(endpoint, file, trace, speed, made_up, seed)
    fields: dict[str, Any] = {"temperature": temperature}
    if ignore_eos or (ignore_eos is None and file is None):
        fields["ignore_eos"] = True
    target = _Target(url, endpoint, model, read_key(api_key_file), fields, timeout)
    requests = source.requests(num_requests + warmup)
    first, requests = requests[num_requests:] or requests[:warmup], requests[:num_requests]
    model, load = asyncio.run(_run(target, first, requests, pace, seed))
    result = summarize(load, limits_ms=limits_ms, percentiles=cuts)
    print_result(result, Console())
    if as_json is not None:
        asked = {
            **target.as_json(),
            "model": model,
            "num_requests": len(requests),
            **asdict(pace),
            **source.as_json(),
            "limits_ms": limits_ms,
        }
        write_figures(as_json, {"url": target.url, "load": asked, **result.as_json()})
    if len(load.outcomes) < len(requests):
        raise typer.Exit(_INTERRUPTED)
    if result.failed:
        raise typer.Exit(1)


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
        self._check_options()
        if self.file is not None:
            return file_requests(self.file, count, wanted.output_tokens)
        if self.trace is not None:
            return trace_requests(
                self.trace, limit=count, speed=self.speed, vocab_size=wanted.vocab_size
            )
        return random_requests(wanted, count, self.endpoint, self.seed)

    def as_json(self) -> dict[str, Any]:
        wanted = self.made_up
        prompts: dict[str, Any] = asdict(wanted)
        if self.file is not None:
            prompts = {"file": str(self.file), "output_tokens": wanted.output_tokens}
        elif self.trace is not None:
            prompts = {"trace": str(self.trace), "speed": self.speed}
            prompts["vocab_size"] = wanted.vocab_size
        return {"prompts": prompts, "seed": self.seed}

    def _check_options(self) -> None:
        """Raises CommandError."""
        wanted = self.made_up
        _check_above_zero("--speed", self.speed)
        if self.file is not None and self.trace is not None:
            raise CommandError(
                "--file and --trace are two sources of prompts: leave one of them out."
            )
        if self.speed != 1 and self.trace is None:
            raise CommandError("--speed is that of a --trace: name one, or leave --speed out.")
        if self.trace is not None and self.endpoint == "chat":
            raise CommandError(
                "A trace is played with token ids, which chats do not take: leave --endpoint out."
            )
        is_made_up = self.file is None and self.trace is None
        if is_made_up and wanted.prefix_tokens >= wanted.input_tokens:
            raise CommandError(
                f"--prefix-tokens is {wanted.prefix_tokens}, but must be below --input-tokens, "
                f"which is {wanted.input_tokens}."
            )
        self._check_unused()

    def _check_unused(self) -> None:
        """Raises CommandError."""
        used = self.as_json()["prompts"]
        options = inspect.signature(bench).parameters
        for name, value in asdict(self.made_up).items():
            if name not in used and value != options[name].default:
                option = f"--{name.replace('_', '-')}"
                raise CommandError(
                    f"{option} is that of made-up prompts: leave it out, or --file or --trace."
                )


def _pace(
    request_rate: float | None, burstiness: float, concurrency: int | None, trace: Path | None
) -> "Pace":
    """Raises CommandError."""
    from cluster.bench_load import Pace

    _check_above_zero("--burstiness", burstiness)
    if request_rate is not None:
        _check_above_zero("--request-rate", request_rate)
        if trace is not None:
            raise CommandError(
                "--request-rate and --trace are two sources of send times: leave one of them out, "
                "or change the trace's with --speed."
            )
    elif burstiness != 1:
        raise CommandError(
            "--burstiness is that of a --request-rate: name one, or leave --burstiness out."
        )
    return Pace(request_rate, burstiness, concurrency)


@dataclass(frozen=True, slots=True)
class _Target:
    url: str
    endpoint: BenchEndpoint
    model: str | None
    api_key: str | None
    fields: dict[str, Any]
    timeout_seconds: float

    def as_json(self) -> dict[str, Any]:
        return {"endpoint": self.endpoint, "ignore_eos": False, **self.fields}


async def _run(
    target: _Target,
    first: "Sequence[BenchRequest]",
    requests: "Sequence[BenchRequest]",
    pace: "Pace",
    seed: int,
) -> "tuple[str, LoadResult]":
    """Send the `first` one by one, which also tells before the long wait whether the server takes
    such requests, and then the others. Returns the model that was asked, and what came."""
    from cluster.bench_client import BenchClient, first_model, open_session
    from cluster.bench_load import LoadCancelledError, run_load

    async with open_session(target.api_key, timeout_seconds=target.timeout_seconds) as session:
        model = target.model or await first_model(session, target.url)
        client = BenchClient(session, target.url, target.endpoint, model, target.fields)
        for request in first:
            outcome = await client.ask(request)
            if outcome.error is not None:
                raise CommandError(f"The first request failed: {outcome.error.rstrip('.')}.")
        with _progress(len(requests)) as on_end:
            try:
                load = await run_load(client, requests, pace, seed=seed, on_end=on_end)
            except LoadCancelledError as cancelled:  # by Ctrl-C
                load = cancelled.result
        return model, load


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
