"""Speed of one rank on CPU, beside transformers' `generate` in the same run.

    python -m tests.benchmarks.worker_speed --model DIRECTORY --dtype bfloat16 --threads 2

Decode: milliseconds from a plan to its result, at several batch sizes. Prefill: tokens a second
of one prompt in chunks. `without attention` repeats ours with attention left out, which tells
where the time goes. Ours and theirs alternate, so that a busy neighbour hits both; the smallest
of all rounds is reported with the median, because only the smallest is free of neighbours.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Protocol

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM

from scheduler.messages import (
    Close,
    CloseReason,
    Open,
    SamplingParams,
    SeqRef,
    SeqWork,
    StepPlan,
    pack_token_ids,
)
from tests.support.models import quiet_transformers
from worker.attention.base import AttentionBackend, AttentionBatch, AttentionRule, LayerCache
from worker.attention.select import select_attention
from worker.comm import Group
from worker.device import use_threads
from worker.executor import Executor, Shard
from worker.kv_cache import CacheSize, KVCache
from worker.models.base import Decoder
from worker.models.registry import load_decoder

BLOCK_SIZE = 16
GREEDY = SamplingParams(max_tokens=1 << 20, seed=0, temperature=0.0)


clock = time.perf_counter
"""What is measured with; `--cpu-time` takes the process's own, which neighbours do not stretch."""


class Subject(Protocol):
    """What is measured. Times are seconds of `clock`."""

    def decode(self, batch: int, context: int, steps: int) -> list[float]:
        """Of each step, from `context` tokens on."""
        ...

    def prefill(self, length: int, chunk: int) -> float:
        """From the prompt to the first token."""
        ...


class NoAttention:
    """What is left of a step without attention."""

    name = "none"

    def attend(
        self,
        q_tHD: Tensor,
        k_tGD: Tensor,
        v_tGD: Tensor,
        cache: LayerCache,
        batch: AttentionBatch,
        rule: AttentionRule,
    ) -> Tensor:
        return torch.zeros_like(q_tHD, memory_format=torch.contiguous_format)


class Ours:
    """An executor driven by hand-made plans: what the scheduler would send, without it."""

    def __init__(self, decoder: Decoder, cache: KVCache, attention: AttentionBackend) -> None:
        shard = Shard(decoder, cache, attention, torch.device("cpu"))
        self._executor = Executor(shard, Group(), epoch=0)
        self._step_id = 0
        self._openings = 0

    def run(self, updates: tuple[Any, ...], work: tuple[SeqWork, ...]) -> float:
        plan = StepPlan(0, self._step_id, updates, work)
        self._step_id += 1
        began = clock()
        self._executor.execute(plan)
        return clock() - began

    def decode(self, batch: int, context: int, steps: int) -> list[float]:
        self._openings += 1
        seqs = [SeqRef(f"{self._openings}/{i}", 1) for i in range(batch)]
        blocks = -(-(context + steps + 1) // BLOCK_SIZE)
        for i, seq in enumerate(seqs):
            ids = tuple(range(1 + i * blocks, 1 + (i + 1) * blocks))
            # What the cache holds does not matter for speed: declared as computed but for one.
            prompt = pack_token_ids(3 + (i * 31 + p * 17) % 500 for p in range(context))
            opening = Open(seq, prompt, context, ids, context - 1, GREEDY)
            self.run((opening,), (SeqWork(seq, context - 1, 1, True),))
        seconds = [
            self.run((), tuple(SeqWork(seq, context + step, 1, True) for seq in seqs))
            for step in range(steps)
        ]
        self.run(tuple(Close(seq, CloseReason.FINISHED) for seq in seqs), ())
        return seconds

    def prefill(self, length: int, chunk: int) -> float:
        self._openings += 1
        seq = SeqRef(f"prefill{self._openings}", 1)
        prompt = pack_token_ids(3 + p % 500 for p in range(length))
        opening = Open(seq, prompt, length, tuple(range(1, length // BLOCK_SIZE + 2)), 0, GREEDY)
        seconds = 0.0
        updates: tuple[Any, ...] = (opening,)
        for start in range(0, length, chunk):
            count = min(chunk, length - start)
            piece = SeqWork(seq, start, count, start + count == length)
            seconds += self.run(updates, (piece,))
            updates = ()
        self.run((Close(seq, CloseReason.FINISHED),), ())
        return seconds


class Theirs:
    """transformers' `generate`, greedy, with its own dynamic cache."""

    def __init__(self, directory: Path, dtype: str) -> None:
        with quiet_transformers():
            self._model = AutoModelForCausalLM.from_pretrained(
                directory, dtype=getattr(torch, dtype)
            ).eval()

    def decode(self, batch: int, context: int, steps: int) -> list[float]:
        """One number: what each of `steps` more tokens costs."""
        ids = (3 + torch.arange(context) % 500).expand(batch, -1)
        return [(self._generate(ids, steps + 1) - self._generate(ids, 1)) / steps]

    def prefill(self, length: int, chunk: int) -> float:
        return self._generate(3 + torch.arange(length)[None] % 500, 1)

    def _generate(self, ids: Tensor, count: int) -> float:
        began = clock()
        self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
        return clock() - began


def main(
    model: Annotated[Path, typer.Option(help="Directory of the model.")],
    dtype: Annotated[str, typer.Option()] = "bfloat16",
    threads: Annotated[int, typer.Option()] = 2,
    rounds: Annotated[int, typer.Option()] = 3,
    steps: Annotated[int, typer.Option(help="Decode steps of a round.")] = 12,
    context: Annotated[int, typer.Option()] = 256,
    prompt: Annotated[int, typer.Option(help="Length of the prefill.")] = 1500,
    chunk: Annotated[int, typer.Option()] = 512,
    skip_theirs: Annotated[bool, typer.Option("--skip-theirs")] = False,
    cpu_time: Annotated[
        bool,
        typer.Option("--cpu-time", help="Seconds of CPU, over all threads, on a busy machine."),
    ] = False,
) -> None:
    global clock
    clock = time.process_time if cpu_time else time.perf_counter
    use_threads(threads)
    decoder = load_decoder(model, dtype=dtype)
    longest = max(context + 2 * steps, prompt) // BLOCK_SIZE + 2
    size = CacheSize(max(32 * ((context + steps) // BLOCK_SIZE + 2), longest), BLOCK_SIZE)
    device = torch.device("cpu")
    cache = KVCache(decoder.spec, size=size, dtype=decoder.spec.dtype, device=device)
    subjects: dict[str, Subject] = {
        "ours": Ours(decoder, cache, select_attention(device, decoder.spec.dtype, cache.dtype)),
        "without attention": Ours(decoder, cache, NoAttention()),
    }
    if not skip_theirs:
        subjects["transformers"] = Theirs(model, dtype)
    table = Table(title=f"{model.name}, {dtype}, {threads} threads: smallest (median)")
    for column in ("", *subjects, "transformers / ours"):
        table.add_column(column, justify="right")
    for batch in (1, 8, 32):
        seconds = measured(subjects, rounds, partial(decode, batch, context, steps))
        table.add_row(
            f"decode, batch {batch}, context {context}, ms",
            *cells(seconds, lambda one: f"{one * 1e3:.1f}"),
        )
    seconds = measured(subjects, rounds, partial(prefill, prompt, chunk))
    table.add_row(
        f"prefill of {prompt} in chunks of {chunk}, tokens/s",
        *cells(seconds, lambda one: f"{prompt / one:.0f}"),
    )
    Console(width=130).print(table)


def decode(batch: int, context: int, steps: int, subject: Subject) -> list[float]:
    return subject.decode(batch, context, steps)


def prefill(length: int, chunk: int, subject: Subject) -> list[float]:
    return [subject.prefill(length, chunk)]


def measured(
    subjects: dict[str, Subject], rounds: int, measure: Callable[[Subject], list[float]]
) -> dict[str, list[float]]:
    """Seconds of every subject, in turn, after one round that does not count."""
    found: dict[str, list[float]] = {name: [] for name in subjects}
    for round_ in range(rounds + 1):
        for name, subject in subjects.items():
            seconds = measure(subject)
            if round_:
                found[name] += seconds
    return found


def cells(found: dict[str, list[float]], show: Callable[[float], str]) -> list[str]:
    shown = [
        f"{show(min(seconds))} ({show(statistics.median(seconds))})" for seconds in found.values()
    ]
    if "transformers" in found:
        shown.append(f"{min(found['transformers']) / min(found['ours']):.2f}")
    return shown


if __name__ == "__main__":
    typer.run(main)
