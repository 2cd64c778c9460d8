"""Recorded workloads as a list of `TraceRequest`: which requests arrived when, and how long.

Three formats are known, told apart by content, each also gzipped:

- Mooncake JSONL: `{"timestamp": ms, "input_length": n, "output_length": m, "hash_ids": […]}`,
  one hash id per 512 prompt tokens, equal ids for equal prefixes. Without `hash_ids` a prompt
  shares nothing.
- Azure LLM inference CSV: `TIMESTAMP,ContextTokens,GeneratedTokens`.
- lengths JSONL: `{"prompt_tokens": n, "output_tokens": m, "arrival_seconds": s}`; the last
  may be missing, then all requests arrive at once.

A recorded output of 0 tokens counts as 1: a request that is served samples at least once.
"""

import gzip
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec

from cluster.errors import CommandError
from scheduler.simulate import MAX_PREFIX_IDS, TOKENS_PER_PREFIX_ID, TraceRequest

KNOWN_FORMATS = (
    "Mooncake JSONL (timestamp, input_length, output_length, hash_ids), "
    "Azure CSV (TIMESTAMP,ContextTokens,GeneratedTokens) and "
    "lengths JSONL (prompt_tokens, output_tokens, arrival_seconds)"
)

_GZIP_MAGIC = b"\x1f\x8b"
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")

# Longer than any context there is: a length above it is a broken line, not a request.
_MAX_TOKENS = 1 << 24

_PromptTokens = Annotated[int, msgspec.Meta(ge=1, le=_MAX_TOKENS)]
_OutputTokens = Annotated[int, msgspec.Meta(ge=0, le=_MAX_TOKENS)]


class TraceError(CommandError):
    """A trace that cannot be used; names the file and, where one is at fault, the line."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests by arrival; the first arrives at 0."""

    format: str
    requests: list[TraceRequest]


class _MooncakeLine(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: _PromptTokens
    output_length: _OutputTokens
    hash_ids: tuple[int, ...] = ()


class _LengthsLine(msgspec.Struct):
    prompt_tokens: _PromptTokens
    output_tokens: _OutputTokens
    arrival_seconds: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class _AzureRow(msgspec.Struct):
    TIMESTAMP: datetime
    ContextTokens: _PromptTokens
    GeneratedTokens: _OutputTokens


def read_trace(path: Path, *, limit: int | None = None, speed: float = 1.0) -> Trace:
    """The first `limit` requests of `path`, arriving `speed` times as fast.

    Raises TraceError if the file cannot be read, is of no known format, has a broken line or
    no request at all.
    """
    try:
        with _open(path) as file:
            name, requests = _parse(path, file)
            kept = list(islice(requests, limit))
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise TraceError(f"Cannot read the trace {path}: {reason}.") from error
    if not kept:
        raise TraceError(f"The trace {path} holds no request.")
    kept.sort(key=lambda request: request.arrival_seconds)
    first = kept[0].arrival_seconds
    return Trace(
        name,
        [replace(r, arrival_seconds=(r.arrival_seconds - first) / speed) for r in kept],
    )


def _open(path: Path) -> BinaryIO:
    with path.open("rb") as file:
        zipped = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
    return gzip.open(path) if zipped else path.open("rb")  # type: ignore[return-value]


def _parse(path: Path, file: BinaryIO) -> tuple[str, Iterator[TraceRequest]]:
    numbered = ((number, line) for number, line in enumerate(file, 1) if line.strip())
    first = next(numbered, None)
    if first is None:
        raise TraceError(f"The trace {path} is empty.")
    name, parse_line = _detect(path, first[1])
    lines = numbered if name == "Azure CSV" else chain((first,), numbered)
    return name, _parse_lines(path, lines, name, parse_line)


def _parse_lines(
    path: Path,
    lines: Iterator[tuple[int, bytes]],
    name: str,
    parse_line: Callable[[bytes], TraceRequest],
) -> Iterator[TraceRequest]:
    for number, line in lines:
        try:
            yield parse_line(line)
        except ValueError as error:  # msgspec's errors and UnicodeDecodeError are ValueErrors
            raise TraceError(
                f"{path}, line {number}: this is no request in {name}: {error}."
            ) from error


def _detect(path: Path, first_line: bytes) -> tuple[str, Callable[[bytes], TraceRequest]]:
    """Name and line parser of the format whose first line this is."""
    if _csv_fields(first_line) == _AZURE_COLUMNS:
        return "Azure CSV", _azure_request
    try:
        keys = msgspec.json.decode(first_line, type=dict[str, object]).keys()
    except ValueError:
        keys = {}.keys()
    if "input_length" in keys:
        return "Mooncake JSONL", _MooncakeReader()
    if "prompt_tokens" in keys:
        return "lengths JSONL", _lengths_request
    raise TraceError(f"{path} is in no known trace format; known are {KNOWN_FORMATS}.")


class _MooncakeReader:
    def __init__(self) -> None:
        self._decode = msgspec.json.Decoder(_MooncakeLine).decode
        self._numbers: dict[int, int] = {}  # hash ids may be any integers; ours count from 0

    def __call__(self, line: bytes) -> TraceRequest:
        row = self._decode(line)
        needed = -(-row.input_length // TOKENS_PER_PREFIX_ID)
        if row.hash_ids and len(row.hash_ids) != needed:
            raise ValueError(
                f"{row.input_length} prompt tokens need {needed} hash ids "
                f"(one per {TOKENS_PER_PREFIX_ID} tokens), got {len(row.hash_ids)}"
            )
        numbers = self._numbers
        prefix_ids = tuple(numbers.setdefault(one, len(numbers)) for one in row.hash_ids)
        if len(numbers) > MAX_PREFIX_IDS:
            raise ValueError(
                f"more than {MAX_PREFIX_IDS} different hash ids up to here; use --limit to read "
                f"fewer requests"
            )
        return TraceRequest(
            arrival_seconds=row.timestamp / 1000,
            prompt_tokens=row.input_length,
            output_tokens=max(1, row.output_length),
            prefix_ids=prefix_ids,
        )


_decode_lengths = msgspec.json.Decoder(_LengthsLine).decode


def _lengths_request(line: bytes) -> TraceRequest:
    row = _decode_lengths(line)
    return TraceRequest(row.arrival_seconds, row.prompt_tokens, max(1, row.output_tokens))


def _azure_request(line: bytes) -> TraceRequest:
    fields = _csv_fields(line)
    if len(fields) != len(_AZURE_COLUMNS):
        raise ValueError(f"{len(_AZURE_COLUMNS)} columns expected, got {len(fields)}")
    row = msgspec.convert(dict(zip(_AZURE_COLUMNS, fields, strict=True)), _AzureRow, strict=False)
    arrival = row.TIMESTAMP
    if arrival.tzinfo is None:  # else a change to summer time would move half of the trace
        arrival = arrival.replace(tzinfo=UTC)
    return TraceRequest(arrival.timestamp(), row.ContextTokens, max(1, row.GeneratedTokens))


def _csv_fields(line: bytes) -> tuple[str, ...]:
    return tuple(line.decode("utf-8-sig", errors="replace").strip().split(","))
