"""Milliseconds of all matrix products of one decode or prefill step, by form of linear layer.

    python -m tests.benchmarks.linear_speed --threads 2

The shapes are those of SmolLM2-135M, with random weights. The forms take turns, so that a busy
neighbour hits all of them; the smallest of all rounds stands beside the median. Forms that this
CPU lacks are left out. Norms, gates and residuals are left out of all, although our kernel does
them on the way.
"""

import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from worker.models.cpu_kernels import PackedLinear
from worker.models.linear import PlainLinear, ReorderedLinear, WideningLinear

NUM_LAYERS = 30
SHAPES = {
    "qkv": (960, 576),
    "output": (576, 576),
    "gate and up": (3072, 576),
    "down": (576, 1536),
}
HEAD = (49152, 576)
SLOW_MILLISECONDS = 300
ENOUGH_MILLISECONDS = 2000
"""Of one form and number of rows; no round begins after it."""
FORMS: dict[str, Callable[..., Any]] = {
    "our kernel": PackedLinear,
    "F.linear": PlainLinear,
    "oneDNN, reordered": ReorderedLinear,
    "widened": WideningLinear,
}
console = Console(width=120)


def weights(dtype: torch.dtype) -> list[Tensor]:
    """Of all layers, and of the head at the end."""
    shapes = [*list(SHAPES.values()) * NUM_LAYERS, HEAD]
    return [torch.randn(shape).mul_(0.05).to(dtype) for shape in shapes]


def milliseconds(linears: list[Any], inputs: dict[int, Tensor], widths: list[int]) -> float:
    """The head gets at most 32 rows: one for each sequence, however long the chunk."""
    began = time.perf_counter()
    for linear, width in zip(linears[:-1], widths, strict=False):
        linear(inputs[width])
    linears[-1](inputs[HEAD[1]][:32])
    return 1e3 * (time.perf_counter() - began)


def measure(dtype: torch.dtype, rows: list[int], rounds: int, table: Table) -> None:
    matrices = weights(dtype)
    widths = [matrix.shape[1] for matrix in matrices]
    forms = {}
    for name, form in FORMS.items():
        if form is WideningLinear and dtype == torch.float32:
            continue
        try:
            forms[name] = [form(matrix) for matrix in matrices]
        except RuntimeError:
            table.add_row(str(dtype), name, *["not on this CPU"] * len(rows))
    cells: dict[str, list[str]] = {name: [] for name in forms}
    slow: set[str] = set()
    for count in rows:
        inputs = {width: torch.randn(count, width).to(dtype) for width in set(widths)}
        times: dict[str, list[float]] = {name: [] for name in forms}
        for _ in range(rounds):
            for name, linears in forms.items():
                # F.linear takes a minute for 512 rows where it goes row by row.
                wanted = count <= 32 or name not in slow
                if wanted and sum(times[name]) < ENOUGH_MILLISECONDS:
                    times[name].append(milliseconds(linears, inputs, widths))
        for name, found in times.items():
            if found and min(found) > SLOW_MILLISECONDS:
                slow.add(name)
            cell = f"{min(found):.1f} / {statistics.median(found):.1f}" if found else "-"
            cells[name].append(cell)
            console.print(f"{dtype}, {count} rows, {name}: {cell}")
    for name, line in cells.items():
        table.add_row(str(dtype).removeprefix("torch."), name, *line)


def main(
    threads: Annotated[int, typer.Option(help="OpenMP threads.")] = 2,
    rounds: Annotated[int, typer.Option(help="Measurements of each.")] = 15,
    rows: Annotated[list[int], typer.Option(help="Tokens in the step.")] = [1, 8, 32, 512],  # noqa: B006
) -> None:
    torch.set_num_threads(threads)
    table = Table("dtype", "form", *(f"{count} rows" for count in rows))
    table.title = f"all products of a step, ms (smallest / median), {threads} threads"
    with torch.inference_mode():
        for dtype in (torch.bfloat16, torch.float32):
            measure(dtype, rows, rounds, table)
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
