"""`palimpsest simulate`: a recorded workload against the real scheduler and a made-up group."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cluster.config_command import ConfigFile, Overrides
from cluster.errors import CommandError
from configs import LoadedConfig, ResolvedConfig, load, resolve

if TYPE_CHECKING:
    from cluster.traces import Trace
    from scheduler.simulate import SimulationResult, StepCosts

# More blocks than any machine holds today, and still a pool that can be made in seconds.
_MAX_BLOCKS = 1 << 24

# A simulation answers how long requests wait, so it turns none away unless told to.
_NO_LIMIT = 1 << 62
_SIMULATION_DEFAULTS = {
    "max_waiting_requests": _NO_LIMIT,
    "max_waiting_tokens": _NO_LIMIT,
    "steps_in_flight": 1,
}


TraceFile = Annotated[
    Path,
    typer.Option(
        metavar="FILE",
        help="Recorded requests: Mooncake JSONL, Azure CSV, or JSONL with prompt_tokens, "
        "output_tokens and arrival_seconds; gzipped or not.",
    ),
]
PoolSizes = Annotated[
    list[int],
    typer.Option(
        min=2,
        max=_MAX_BLOCKS,
        help="Blocks in the pool, with the null block. Repeat it for a capacity curve.",
    ),
]
BlockSize = Annotated[
    int | None,
    typer.Option(min=1, max=1024, help="Tokens in one block; wins over cache.block_size."),
]
PrefillRate = Annotated[
    float, typer.Option(help="Prompt tokens that the workers compute in one second.")
]
DecodeStep = Annotated[
    float, typer.Option(help="What every step takes besides its prefill tokens.")
]
Speed = Annotated[float, typer.Option(help="Let requests arrive this many times as fast.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Only the first requests of the trace.")]
OutFolder = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Write simulation.json and the figures there."),
]


def simulate(
    trace: TraceFile,
    num_blocks: PoolSizes,
    block_size: BlockSize = None,
    config_file: ConfigFile = None,
    overrides: Overrides = None,
    prefill_tokens_per_second: PrefillRate = 20_000,
    decode_step_ms: DecodeStep = 30,
    speed: Speed = 1,
    limit: Limit = None,
    out: OutFolder = None,
) -> None:
    """See what a block pool of some size would do to a recorded workload.

    The scheduler is the real one; only the workers are made up, and time is what the two cost
    figures say. Without model.max_model_len, the longest request of the trace sets it. The
    waiting queue is unlimited and one step is in flight, unless --set says otherwise.

    Examples:

      palimpsest simulate --trace conversation_trace.jsonl.gz --num-blocks 40001

      palimpsest simulate --trace conversation_trace.jsonl.gz --limit 2000 --speed 0.5
      --num-blocks 10001 --num-blocks 20001 --num-blocks 40001
      --set scheduler.max_num_seqs=128 --out capacity
    """
    from cluster.simulation_report import Report
    from cluster.traces import read_trace
    from scheduler.simulate import StepCosts

    _check_above_zero("--prefill-tokens-per-second", prefill_tokens_per_second)
    _check_above_zero("--decode-step-ms", decode_step_ms)
    _check_above_zero("--speed", speed)
    loaded = load(config_file, overrides or ())
    if out is not None:
        _make_folder(out)
    recorded = read_trace(trace, limit=limit, speed=speed)
    config = _resolved(loaded, block_size, recorded)
    costs = StepCosts(prefill_tokens_per_second, decode_step_ms / 1000)
    results = _run(recorded, config, sorted(set(num_blocks)), costs)
    report = Report(trace.name, recorded, config, costs, speed, results)
    report.print(Console())
    if out is not None:
        written = report.write(out)
        typer.echo(f"Written to {out}: {', '.join(written)}")


def _check_above_zero(option: str, value: float) -> None:
    if not (isfinite(value) and value > 0):
        raise CommandError(f"{option} is {value:g}, but must be a number above 0.")


def _resolved(loaded: LoadedConfig, block_size: int | None, trace: "Trace") -> ResolvedConfig:
    """What was configured, with the rest chosen for the simulation, and checked as a whole."""
    config = loaded.config
    scheduler = {
        key: value
        for key, value in _SIMULATION_DEFAULTS.items()
        if loaded.sources[f"scheduler.{key}"].kind == "default"
    }
    if config.parallel.pipeline_parallel_size > 1:
        scheduler.pop("steps_in_flight", None)  # a pipeline that holds one step has no point
    cache = {} if block_size is None else {"block_size": block_size}
    model = {}
    if config.model.max_model_len is None:
        model["max_model_len"] = max(r.prompt_tokens + r.output_tokens for r in trace.requests)
    return resolve(
        config.model_copy(
            update={
                "scheduler": config.scheduler.model_copy(update=scheduler),
                "cache": config.cache.model_copy(update=cache),
                "model": config.model.model_copy(update=model),
            }
        ),
        "cuda",
    )


def _run(
    trace: "Trace", config: ResolvedConfig, pool_sizes: Sequence[int], costs: "StepCosts"
) -> list["SimulationResult"]:
    """One simulation per pool size, the smallest first: if one serves nobody, it is that one."""
    from scheduler.simulate import AllRefusedError, simulate

    assert config.model.max_model_len is not None
    results = []
    for num_blocks in pool_sizes:
        with _progress(f"{num_blocks:,} blocks", len(trace.requests)) as on_progress:
            try:
                result = simulate(
                    trace.requests,
                    scheduler=config.scheduler,
                    cache=config.cache,
                    num_blocks=num_blocks,
                    max_model_len=config.model.max_model_len,
                    costs=costs,
                    pipeline_stages=config.parallel.pipeline_parallel_size,
                    on_progress=on_progress,
                )
            except AllRefusedError as error:
                raise CommandError(
                    f"With --num-blocks {num_blocks} and blocks of {config.cache.block_size} "
                    f"tokens, {error}."
                ) from error
        results.append(result)
    return results


class _OnProgress(Protocol):
    def __call__(self, num_ended: int) -> None: ...


@contextmanager
def _progress(description: str, num_requests: int) -> Iterator[_OnProgress]:
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("requests"),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(description, total=num_requests)

        def on_progress(num_ended: int) -> None:
            bar.update(task, completed=num_ended)

        yield on_progress


def _make_folder(folder: Path) -> None:
    """Before the work, so that nothing is computed that cannot be kept."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(
            f"Cannot write to {folder}: {error.strerror}; choose another folder with --out."
        ) from error
