"""`palimpsest status`: what runs on a Ray cluster, and how it is doing."""

import json
from dataclasses import asdict
from typing import Annotated, Any

import msgspec
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from cluster.errors import CommandError
from cluster.local_ray import AUTO, clusters_at, joined_cluster
from cluster.supervisor_view import AppStatus
from scheduler.status import Counters, Spread, Timings

Address = Annotated[
    str,
    typer.Option(
        help="Ray cluster to look at; `auto` stands for those that `palimpsest serve` has started "
        "on this machine, or else the one that Ray finds here."
    ),
]

_ANSWER_SECONDS = 10.0


def status(
    address: Address = AUTO,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show the applications of a cluster: ranks, blocks, queue, interruptions, step times.

    Examples:

      palimpsest status

      palimpsest status --address auto --json
    """
    statuses = []
    for cluster in clusters_at(address):
        with joined_cluster(cluster):
            statuses += _all_statuses()
    if not statuses:
        raise CommandError(
            f"No application runs on the Ray cluster at {address}; start one with "
            f"`palimpsest serve`."
        )
    if as_json:
        typer.echo(json.dumps([_as_json(status) for status in statuses], indent=2))
        return
    console = Console()
    for app_status in statuses:
        _print(app_status, console)


def _all_statuses() -> list[AppStatus]:
    import ray

    from cluster.supervisor import existing_supervisors

    calls = {app: handle.status.remote() for app, handle in existing_supervisors().items()}
    statuses = []
    for app, call in sorted(calls.items()):
        try:
            statuses.append(ray.get(call, timeout=_ANSWER_SECONDS))
        except ray.exceptions.RayActorError:
            continue  # it has just ended
        except ray.exceptions.GetTimeoutError as error:
            raise CommandError(
                f"The supervisor of {app} does not answer within {_ANSWER_SECONDS:.0f} s; "
                f"`palimpsest stop --name {app}` ends it."
            ) from error
    return statuses


def _as_json(status: AppStatus) -> dict[str, Any]:
    scheduler = status.scheduler
    return {
        "app": status.app,
        "model": status.model,
        "engine": msgspec.structs.asdict(status.info),
        "shape": status.shape and asdict(status.shape),
        "num_replicas": status.num_replicas,
        "scheduler_place": status.scheduler_place and asdict(status.scheduler_place),
        "places": [asdict(place) for place in status.places],
        "supervisor_place": asdict(status.supervisor_place),
        "replica_places": [asdict(place) for place in status.replica_places],
        "counters": scheduler and scheduler.counters and asdict(scheduler.counters),
        "timings": scheduler and asdict(scheduler.timings),
        "num_restarts": status.num_restarts,
        "recoveries": [asdict(recovery) for recovery in status.recoveries],
    }


def _print(status: AppStatus, console: Console) -> None:
    info = status.info
    reason = f": {info.reason}" if info.reason else ""
    console.print(f"[bold]{status.app}[/bold] ({status.model}) is {info.state}{reason}")
    console.print(
        f"{status.shape}, epoch {info.epoch}, {status.num_replicas} replicas hold the lease"
    )
    if status.recoveries:
        last = status.recoveries[-1]
        console.print(
            f"{status.num_restarts} processes took the place of others; the last recovery took "
            f"{last.joined_seconds - last.noticed_seconds:.1f} s: {last.reason}"
        )
    console.print(_processes(status))
    scheduler = status.scheduler
    if scheduler is not None and scheduler.counters is not None:
        console.print(_facts(status, scheduler.counters, scheduler.timings))


def _processes(status: AppStatus) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("process", "machine", "node", "pid"):
        table.add_column(column)
    for name, place in status.processes.items():
        table.add_row(name, place.host, place.node_id[:12], str(place.process_id))
    return table


def _facts(status: AppStatus, counters: Counters, timings: Timings) -> Table:
    info = status.info
    table = Table(box=box.SIMPLE, show_header=False)
    usable = info.num_blocks - 1
    table.add_row(
        "blocks",
        f"{counters.held_blocks} held, {counters.evictable_blocks} evictable, "
        f"{counters.scratch_blocks} scratch, of {usable} with {info.block_size} tokens each "
        f"({info.capacity_tokens} tokens)",
    )
    table.add_row(
        "requests",
        f"{info.running_requests} running, {info.waiting_requests} waiting "
        f"({info.waiting_tokens} tokens), {sum(counters.finished.values())} ended"
        f"{_by_name(counters.finished)}",
    )
    table.add_row(
        "interruptions", f"{sum(counters.preemptions.values())}{_by_name(counters.preemptions)}"
    )
    table.add_row("refused", f"{sum(counters.rejected.values())}{_by_name(counters.rejected)}")
    table.add_row("prefix cache", _hit_text(counters))
    table.add_row(
        "tokens computed",
        f"{counters.scheduled_prompt_tokens} prompt, {counters.scheduled_output_tokens} output, "
        f"{counters.scheduled_recompute_tokens} a second time",
    )
    table.add_row("steps", f"{counters.next_step_id}, {counters.steps_in_flight} in flight")
    for what, spread in (
        ("step", timings.execute),
        ("gap between steps", timings.gap),
        ("planning", timings.plan),
    ):
        table.add_row(what, _spread_text(spread))
    return table


def _by_name(counts: dict[str, int]) -> str:
    text = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    return f" ({text})" if text else ""


def _hit_text(counters: Counters) -> str:
    if not counters.queries_tokens:
        return "not asked yet"
    share = counters.hits_tokens / counters.queries_tokens
    return f"{counters.hits_tokens} of {counters.queries_tokens} tokens found ({share:.0%})"


def _spread_text(spread: Spread | None) -> Any:
    if spread is None:
        return "not measured yet"
    return f"{spread.median_ms:.2f} ms in the median, 99 % below {spread.p99_ms:.2f} ms"
