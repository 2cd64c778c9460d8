"""What a load test asks: made-up prompts of exact lengths, texts from a file, a recorded trace."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from cluster.bench_options import BenchEndpoint, read_text
from cluster.errors import CommandError
from cluster.traces import read_trace
from scheduler.messages import unpack_token_ids
from scheduler.simulate.workload import prompt_token_ids

Prompt: TypeAlias = str | list[int]

# Short, and one token each in the vocabularies of most models.
_WORDS = (
    *("the", "of", "and", "to", "in", "is", "you", "that", "it", "he", "was", "for", "on", "are"),
    *("as", "with", "his", "they", "at", "be", "this", "have", "from", "or", "one", "had", "by"),
    *("but", "not", "what", "all", "were", "we", "when", "your", "can", "said", "there", "use"),
)


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request, before it is sent."""

    prompt: Prompt
    """Text, or token ids; the latter for the completions endpoint only."""
    max_tokens: int
    arrival_seconds: float | None = None
    """When a trace says that it arrives; None: the load decides."""

    @property
    def num_token_ids(self) -> int | None:
        """None for a text: its server knows how many tokens it is."""
        return None if isinstance(self.prompt, str) else len(self.prompt)


@dataclass(frozen=True, slots=True)
class RandomPrompts:
    """Prompts that share nothing but a prefix, of which there may be several."""

    input_tokens: int
    output_tokens: int
    vocab_size: int
    prefix_tokens: int = 0
    """Of `input_tokens` so many are shared."""
    num_prefixes: int = 1
    spread: float = 0.0
    """Lengths are drawn evenly from so much below to so much above: 0.2 for 80 to 120 %."""


def random_requests(
    wanted: RandomPrompts, num_requests: int, endpoint: BenchEndpoint, seed: int
) -> list[BenchRequest]:
    """The same for the same seed. In chats the unit is words, of about one token each."""
    rng = np.random.default_rng(seed)
    universe = len(_WORDS) if endpoint == "chat" else wanted.vocab_size

    def draw(count: int) -> list[int]:
        ids: list[int] = rng.integers(0, universe, count).tolist()
        return ids

    prefixes = [draw(wanted.prefix_tokens) for _ in range(wanted.num_prefixes)]
    requests = []
    for number in range(num_requests):
        num_own = _drawn(rng, wanted.input_tokens - wanted.prefix_tokens, wanted.spread)
        ids = prefixes[number % wanted.num_prefixes] + draw(num_own)
        requests.append(
            BenchRequest(
                " ".join(_WORDS[i] for i in ids) if endpoint == "chat" else ids,
                _drawn(rng, wanted.output_tokens, wanted.spread),
            )
        )
    return requests


def _drawn(rng: np.random.Generator, middle: int, spread: float) -> int:
    low, high = int(middle * (1 - spread)), int(middle * (1 + spread))
    return max(1, int(rng.integers(low, high + 1)))


def trace_requests(
    path: Path, *, limit: int | None, speed: float, vocab_size: int
) -> list[BenchRequest]:
    """A recorded workload, with made-up tokens that share what the recorded prompts shared.

    Raises TraceError.
    """
    requests, unique_from = [], 0
    for recorded in read_trace(path, limit=limit, speed=speed).requests:
        packed = prompt_token_ids(recorded, unique_from)
        unique_from += 0 if recorded.prefix_ids else recorded.prompt_tokens
        ids = np.asarray(unpack_token_ids(packed)) % vocab_size
        requests.append(
            BenchRequest(ids.tolist(), recorded.output_tokens, recorded.arrival_seconds)
        )
    return requests


def file_requests(path: Path, num_requests: int, max_tokens: int) -> list[BenchRequest]:
    """The texts of a file in their order, from the start again when they run out.

    A line is a text, or in a file that begins with `{` an object with the text under `prompt`,
    `text`, `question` or `turns` (the first of them). Raises CommandError.
    """
    # splitlines() would also split at what JSON allows within a text, as U+2028.
    lines = [line for line in read_text(path, "prompts").split("\n") if line.strip()]
    if not lines:
        raise CommandError(f"The file {path} holds no prompt.")
    texts = list(_texts_of(path, lines)) if lines[0].lstrip().startswith("{") else lines
    return [BenchRequest(texts[i % len(texts)], max_tokens) for i in range(num_requests)]


def _texts_of(path: Path, lines: Sequence[str]) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        try:
            yield _text_of(json.loads(line))
        except ValueError as error:
            raise CommandError(
                f"{path}, prompt {number}: this is no JSON with a text to ask: {error}."
            ) from error


def _text_of(row: Any) -> str:
    """Raises ValueError."""
    text = None
    if isinstance(row, dict):
        turns = row.get("turns")
        first_turn = turns[0] if turns and isinstance(turns, list) else None
        text = row.get("prompt") or row.get("text") or row.get("question") or first_turn
    if not isinstance(text, str):
        raise ValueError(
            "it must be an object with one under `prompt`, `text`, `question` or `turns`"
        )
    text.encode()  # fails for half of a surrogate pair, which JSON can say and UTF-8 cannot
    return text
