"""All-reduce between CPU ranks on one host: through shared memory, and through gloo.

    python -m tests.benchmarks.collectives_speed --ranks 2

Microseconds of one call, smallest and median, in float32. The two alternate in every round.
"""

import statistics
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

from configs.ranks import RankPlace
from configs.sections import ParallelConfig
from worker.comm import Group
from worker.distributed import GroupJoin, Meeting

SHAPES = ((1, 576), (32, 576), (512, 576))
BACKENDS = {"shared memory": True, "gloo": False}


def run_rank(port: int, rank: int, ranks: int, calls: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    place, parallel = RankPlace(0, rank), ParallelConfig(tensor_parallel_size=ranks)
    groups: dict[str, Group] = {}
    for name, shared_memory in BACKENDS.items():
        meeting = Meeting(dist.PrefixStore(name, store), shared_memory=shared_memory)
        groups[name], _ = GroupJoin(meeting, parallel, place).join(torch.device("cpu"))
    found: dict[tuple[str, tuple[int, int]], list[float]] = {}
    for shape in SHAPES:
        x = torch.ones(shape)
        for round_ in range(6):
            for name, group in groups.items():
                for _ in range(calls):
                    began = time.perf_counter()
                    group.tensor.all_reduce(x)
                    if round_:
                        found.setdefault((name, shape), []).append(time.perf_counter() - began)
                x.fill_(1.0)
    pipe.send(found)


def main(
    ranks: Annotated[int, typer.Option()] = 2,
    calls: Annotated[int, typer.Option(help="Calls of a round.")] = 100,
) -> None:
    context = get_context("forkserver")
    context.set_forkserver_preload(["worker.distributed"])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = []
    for rank in range(ranks):
        ours, theirs = context.Pipe()
        arguments = (store.port, rank, ranks, calls, theirs)
        context.Process(target=run_rank, args=arguments, daemon=True).start()
        pipes.append(ours)
    found, *_ = [pipe.recv() for pipe in pipes]
    table = Table(title=f"all-reduce over {ranks} ranks, microseconds: smallest (median)")
    for column in ("", *BACKENDS):
        table.add_column(column, justify="right")
    for shape in SHAPES:
        cells = [
            f"{min(seconds) * 1e6:.0f} ({statistics.median(seconds) * 1e6:.0f})"
            for seconds in (found[name, shape] for name in BACKENDS)
        ]
        table.add_row(f"{shape[0]} x {shape[1]}", *cells)
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
