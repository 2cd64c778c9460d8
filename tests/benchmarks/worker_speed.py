"""Speed of one rank on CPU, beside transformers' `generate` in the same run.

    python -m tests.benchmarks.worker_speed --model DIRECTORY --dtype bfloat16 --threads 2

Decode: milliseconds from a plan to its result, at several batch sizes. Prefill: tokens a second
of one prompt in chunks. `without attention` repeats ours with attention left out, which tells
where the time goes; `floor` is what this machine's arithmetic and memory cost however well the
step is written. Ours and theirs alternate, so that a busy neighbour hits both; the smallest of all
rounds is reported with the median, because only the smallest is free of neighbours.

The peer has one round, and is asked in the dtype that this CPU computes: without instructions for
half precision torch takes seconds for a step of it. `--peer-dtype` asks for another.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from tests.benchmarks.machine import Machine, StepCost
from tests.benchmarks.subjects import BLOCK_SIZE, NoAttention, Ours, Subject, Theirs
from worker.attention.select import select_attention
from worker.device import use_threads
from worker.kv_cache import CacheSize, KVCache, cache_dtype
from worker.models.registry import load_decoder

BATCHES = (1, 8, 32)
CPU = torch.device("cpu")
Seconds = dict[str, list[float]]

console = Console(width=150)


def main(
    model: Annotated[Path, typer.Option(help="Directory of the model.")],
    dtype: Annotated[str, typer.Option()] = "bfloat16",
    kv_cache_dtype: Annotated[str, typer.Option(help="auto: that of the model.")] = "auto",
    threads: Annotated[int, typer.Option()] = 2,
    rounds: Annotated[int, typer.Option(help="Of ours.")] = 3,
    steps: Annotated[int, typer.Option(help="Decode steps of a round.")] = 12,
    context: Annotated[int, typer.Option()] = 256,
    prompt: Annotated[int, typer.Option(help="Length of the prefill.")] = 1500,
    chunk: Annotated[int, typer.Option()] = 512,
    peer_dtype: Annotated[str, typer.Option(help="auto: what this CPU computes.")] = "auto",
    skip_peer: Annotated[bool, typer.Option("--skip-peer")] = False,
) -> None:
    use_threads(threads)
    machine = Machine.measured()
    decoder = load_decoder(model, dtype=dtype)
    spec = decoder.spec
    blocks = max(max(BATCHES) * ((context + steps) // BLOCK_SIZE + 1), prompt // BLOCK_SIZE + 1)
    kept = cache_dtype(kv_cache_dtype, spec.dtype)
    cache = KVCache(spec, size=CacheSize(1 + blocks, BLOCK_SIZE), dtype=kept, device=CPU)
    subjects: dict[str, Subject] = {
        "ours": Ours(decoder, cache, select_attention(CPU, spec.dtype, kept)),
        "without attention": Ours(decoder, cache, NoAttention()),
    }
    if not skip_peer:
        theirs = computed_dtype(spec.dtype) if peer_dtype == "auto" else getattr(torch, peer_dtype)
        subjects[f"transformers, {shown(theirs)}"] = Theirs(model, theirs)
    table = Table(title=f"{model.name}, {dtype}, {threads} threads: smallest (median)")
    for column in ("", "floor", *subjects):
        table.add_column(column, justify="right")
    found = []
    for figure in figures(StepCost.of(model, spec), context, steps, prompt, chunk):
        seconds = measured(figure, subjects, rounds)
        found.append((figure, seconds))
        best = ", ".join(f"{name} {figure.show(min(one))}" for name, one in seconds.items())
        console.print(f"{figure.what}: {best}")
        machine = machine.or_better(Machine.measured())
    for figure, seconds in found:
        table.add_row(figure.what, *cells(figure, machine, seconds))
    table.caption = f"floor: {machine}"
    console.print(table)


@dataclass(frozen=True, slots=True)
class Figure:
    """A row of the table."""

    what: str
    act: Callable[[Subject], list[float]]
    """Its seconds."""
    floor: Callable[[Machine], float]
    show: Callable[[float], str]


def figures(cost: StepCost, context: int, steps: int, prompt: int, chunk: int) -> list[Figure]:
    decodes = [
        Figure(
            f"decode, batch {batch}, context {context}, ms",
            partial(decode, batch, context, steps),
            partial(cost.decode_seconds, batch=batch, context=context),
            lambda seconds: f"{seconds * 1e3:.1f}",
        )
        for batch in BATCHES
    ]
    prefilled = Figure(
        f"prefill of {prompt} in chunks of {chunk}, tokens/s",
        partial(prefill, prompt, chunk),
        partial(cost.prefill_seconds, length=prompt),
        lambda seconds: f"{prompt / seconds:.0f}",
    )
    return [*decodes, prefilled]


def computed_dtype(dtype: torch.dtype) -> torch.dtype:
    """`dtype` where the CPU has instructions for it, else float32, which is then faster."""
    supported = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return dtype if dtype in supported and supported[dtype]() else torch.float32


def shown(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def decode(batch: int, context: int, steps: int, subject: Subject) -> list[float]:
    return subject.decode(batch, context, steps)


def prefill(length: int, chunk: int, subject: Subject) -> list[float]:
    return [subject.prefill(length, chunk)]


def measured(figure: Figure, subjects: dict[str, Subject], rounds: int) -> Seconds:
    """Seconds of every subject, in turn: ours after a round that does not count, the peer's one."""
    found: Seconds = {name: [] for name in subjects}
    for round_ in range(rounds + 1):
        for name, subject in subjects.items():
            if isinstance(subject, Theirs) and round_ != 1:
                continue
            began = time.perf_counter()
            seconds = figure.act(subject)
            took = time.perf_counter() - began
            console.print(f"{figure.what}: {name}, round {round_} of {rounds}, {took:.1f} s")
            if round_:
                found[name] += seconds
    return found


def cells(figure: Figure, machine: Machine, found: Seconds) -> list[str]:
    show = figure.show
    return [show(figure.floor(machine))] + [
        f"{show(min(seconds))} ({show(statistics.median(seconds))})" for seconds in found.values()
    ]


if __name__ == "__main__":
    typer.run(main)
