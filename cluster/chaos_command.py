"""`palimpsest chaos`: the operators' game day."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.bench_options import (
    ApiKeyFile,
    BenchEndpoint,
    Endpoint,
    InputTokens,
    JsonFile,
    Model,
    OutputTokens,
    PromptFile,
    Seed,
    Url,
    VocabSize,
    read_key,
    write_figures,
)
from cluster.chaos_schedule import Strike, schedule

if TYPE_CHECKING:
    from cluster.bench_prompts import BenchRequest
    from cluster.chaos_run import ChaosRecord

_STRIKES = "What is struck, and when"


def chaos(
    kills: Annotated[
        list[str] | None,
        typer.Option(
            "--kill",
            metavar="PROCESS@SECONDS",
            rich_help_panel=_STRIKES,
            help="Kill a process so many seconds after the load has begun. Repeatable.",
        ),
    ] = None,
    stalls: Annotated[
        list[str] | None,
        typer.Option(
            "--stall",
            metavar="PROCESS@SECONDS+DURATION",
            rich_help_panel=_STRIKES,
            help="Stop a process, and let it go on after the duration. Repeatable.",
        ),
    ] = None,
    recover_seconds: Annotated[
        float,
        typer.Option(
            min=1, rich_help_panel=_STRIKES, help="How long a recovery is waited for, at most."
        ),
    ] = 300,
    url: Url = "http://127.0.0.1:8000",
    model: Model = None,
    endpoint: Endpoint = "completions",
    api_key_file: ApiKeyFile = None,
    admin_key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The admin key of the server. Unset: PALIMPSEST_ADMIN_KEY."
        ),
    ] = None,
    num_prompts: Annotated[
        int, typer.Option("--num-prompts", "-n", min=1, help="Different prompts, asked in turn.")
    ] = 32,
    concurrency: Annotated[
        int, typer.Option("--concurrency", "-c", min=1, help="Requests under way at a time.")
    ] = 8,
    input_tokens: InputTokens = 64,
    output_tokens: OutputTokens = 64,
    vocab_size: VocabSize = 500,
    file: PromptFile = None,
    seed: Seed = 0,
    as_json: JsonFile = None,
) -> None:
    """Kill or stall processes of a server under load, and see what its clients see of it.

    First every prompt is asked once and nothing happens: these are the texts to expect. Then the
    same prompts are asked again and again while the strikes fall, and until the server is well
    again and has answered one more round. All is greedy, so each text must be the same; with
    another data type than float32 some may differ as they may with other requests in a batch.

    A PROCESS is worker:RANK, scheduler, supervisor or replica:NUMBER (which takes the connections
    through it along). Stalling a worker shows in a recovery only when it lasts longer than
    server.step_deadline_seconds; a shorter one is a pause.

    The server must have been started with server.enable_chaos and an admin key. The exit code is 0
    when no request failed and no text differs, else 1.

    Examples:

      palimpsest chaos --kill worker:0@5

      palimpsest chaos --kill worker:1@5 --kill scheduler@25 --stall worker:0@45+40

      palimpsest chaos --kill supervisor@10 -c 32 -n 64 --json game-day.json
    """
    from rich.console import Console

    from cluster.chaos_report import print_report, summarize

    strikes = schedule(kills or (), stalls or ())
    source = _prompts(endpoint, file, input_tokens, output_tokens, vocab_size, num_prompts, seed)
    target = _Target(
        url,
        model,
        endpoint,
        read_key(api_key_file),
        read_key(admin_key_file) or _admin_key(),
        ignore_eos=file is None,
    )
    record = asyncio.run(_run(target, source, strikes, concurrency, recover_seconds))
    report = summarize(record)
    print_report(report, Console())
    if as_json is not None:
        write_figures(as_json, {"url": target.url, "seed": seed, **report.as_json()})
    if not report.is_clean:
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class _Target:
    url: str
    model: str | None
    endpoint: BenchEndpoint
    api_key: str | None
    admin_key: str
    ignore_eos: bool


def _prompts(
    endpoint: BenchEndpoint,
    file: Path | None,
    input_tokens: int,
    output_tokens: int,
    vocab_size: int,
    count: int,
    seed: int,
) -> "list[BenchRequest]":
    from cluster.bench_prompts import RandomPrompts, file_requests, random_requests

    if file is not None:
        return file_requests(file, count, output_tokens)
    return random_requests(
        RandomPrompts(input_tokens, output_tokens, vocab_size), count, endpoint, seed
    )


def _admin_key() -> str:
    from configs import load

    key = load().config.server.admin_key
    return key.get_secret_value() if key is not None else ""


async def _run(
    target: _Target,
    requests: "Sequence[BenchRequest]",
    strikes: Sequence[Strike],
    concurrency: int,
    recover_seconds: float,
) -> "ChaosRecord":
    from cluster.bench_client import BenchClient, first_model, open_session
    from cluster.chaos_client import ChaosClient
    from cluster.chaos_run import ChaosRun
    from cluster.console import Progress

    async with open_session(target.api_key) as session:
        chaos = ChaosClient(session, target.url, target.admin_key)
        await chaos.check(strikes)
        fields: dict[str, Any] = {"temperature": 0, "seed": 0}
        if target.ignore_eos:
            fields["ignore_eos"] = True
        model = target.model or await first_model(session, target.url)
        client = BenchClient(session, target.url, target.endpoint, model, fields)
        run = ChaosRun(
            client,
            chaos,
            requests,
            concurrency=concurrency,
            recover_seconds=recover_seconds,
            tell=Progress().say,
        )
        return await run.run(strikes)
