"""The options of `palimpsest bench`, which `palimpsest chaos` shares, and the files they name."""

import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import typer

from cluster.errors import CommandError

BenchEndpoint: TypeAlias = Literal["completions", "chat"]

_PROMPTS, _LOAD, _OUTPUT = "What is asked", "How it is sent", "What is told"
_MAX_TOKENS = 1 << 24
"""Longer than any context there is."""
_MAX_VOCAB_SIZE = (1 << 31) - 1
"""Token ids have 32 bits with a sign."""


def _server(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")


def _check_writable(path: Path | None) -> Path | None:
    """Before the load, whose figures would be lost. Raises CommandError."""
    if path is not None:
        place = path if path.exists() else path.parent
        if path.is_dir() or not os.access(place, os.W_OK):
            raise CommandError(
                f"Cannot write the figures to {path}: is {place} there, and may it be written?"
            )
    return path


Url = Annotated[
    str, typer.Option(callback=_server, help="The server; it may end in /v1, as a base_url does.")
]
Model = Annotated[str | None, typer.Option(help="Unset: the first one that the server names.")]
Endpoint = Annotated[BenchEndpoint, typer.Option(help="Which of the two that generate.")]
ApiKeyFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="The key of the server is in this file.")
]
NumRequests = Annotated[
    int, typer.Option("--num-requests", "-n", min=1, help="How many; of a trace the first ones.")
]

InputTokens = Annotated[
    int,
    typer.Option(
        min=1,
        max=_MAX_TOKENS,
        rich_help_panel=_PROMPTS,
        help="Length of made-up prompts, shared part included.",
    ),
]
OutputTokens = Annotated[
    int,
    typer.Option(
        min=1, max=_MAX_TOKENS, rich_help_panel=_PROMPTS, help="The most that is answered."
    ),
]
Spread = Annotated[
    float,
    typer.Option(
        min=0, max=1, rich_help_panel=_PROMPTS, help="0.2: lengths vary from 80 to 120 %."
    ),
]
PrefixTokens = Annotated[
    int,
    typer.Option(min=0, rich_help_panel=_PROMPTS, help="So many tokens prompts begin with alike."),
]
NumPrefixes = Annotated[
    int, typer.Option(min=1, rich_help_panel=_PROMPTS, help="Different beginnings, in turn.")
]
VocabSize = Annotated[
    int,
    typer.Option(
        min=2,
        max=_MAX_VOCAB_SIZE,
        rich_help_panel=_PROMPTS,
        help="Made-up prompts have token ids below this.",
    ),
]
PromptFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        rich_help_panel=_PROMPTS,
        help="Texts to ask: a line each, or JSONL with `prompt`, `text`, `question` or `turns`.",
    ),
]
TraceFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        rich_help_panel=_PROMPTS,
        help="A recorded workload, sent at its recorded times: Mooncake JSONL (prompts share what "
        "they shared), Azure CSV, or JSONL with prompt_tokens and output_tokens.",
    ),
]
Speed = Annotated[
    float, typer.Option(rich_help_panel=_PROMPTS, help="Play the trace so many times as fast.")
]
IgnoreEos = Annotated[
    bool | None,
    typer.Option(
        rich_help_panel=_PROMPTS,
        help="Let every answer have its full length. Unset: yes, but for texts of a file.",
    ),
]
Temperature = Annotated[float, typer.Option(min=0, rich_help_panel=_PROMPTS, help="0 is greedy.")]
Seed = Annotated[
    int, typer.Option(min=0, rich_help_panel=_PROMPTS, help="Of made-up prompts and send times.")
]

Concurrency = Annotated[
    int | None,
    typer.Option(
        "--concurrency", "-c", min=1, rich_help_panel=_LOAD, help="The most requests under way."
    ),
]
RequestRate = Annotated[
    float | None, typer.Option(rich_help_panel=_LOAD, help="Requests per second, on average.")
]
Burstiness = Annotated[
    float,
    typer.Option(
        rich_help_panel=_LOAD,
        help="How even the rate is: 1 as independent users (Poisson), 0.2 in bursts, 100 like a "
        "clock.",
    ),
]
Timeout = Annotated[
    float,
    typer.Option(
        rich_help_panel=_LOAD, help="After so many seconds without a byte an answer has failed."
    ),
]
Warmup = Annotated[
    int,
    typer.Option(
        min=0,
        rich_help_panel=_LOAD,
        help="Requests before that count in no figure. A trace that has no more repeats its first "
        "ones.",
    ),
]

Goodput = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=MS",
        rich_help_panel=_OUTPUT,
        help="Count the requests within this limit: ttft, tpot or e2e. Repeatable.",
    ),
]
Percentiles = Annotated[str, typer.Option(rich_help_panel=_OUTPUT, help="Of all latencies.")]
JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE",
        callback=_check_writable,
        rich_help_panel=_OUTPUT,
        help="Write the figures here.",
    ),
]


def read_key(path: Path | None) -> str | None:
    """Raises CommandError."""
    if path is None:
        return None
    key = read_text(path, "key").strip()
    if not key.isprintable():
        raise CommandError(f"The key in {path} must be one line without control characters.")
    return key


def read_text(path: Path, content: str) -> str:
    """Without a byte order mark, and with newlines alone. Raises CommandError."""
    try:
        return path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no UTF-8 text"
        raise CommandError(f"Cannot read the {content} in {path}: {reason}.") from error


def write_figures(path: Path, content: dict[str, Any]) -> None:
    """Raises CommandError."""
    try:
        path.write_text(json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise CommandError(f"Cannot write the figures to {path}: {error.strerror}.") from error
