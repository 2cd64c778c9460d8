"""`palimpsest scale`: another number of workers for an engine that runs, under its requests."""

from typing import Annotated, Any

import typer

from cluster.applications import Address, applications, no_application
from cluster.console import Progress
from cluster.errors import CommandError
from cluster.local_ray import AUTO, clusters_at, joined_cluster

_ANSWER_SECONDS = 10.0
_TICK_SECONDS = 0.5


def scale(
    tp: Annotated[
        int | None,
        typer.Option("--tp", min=1, max=1024, help="Workers that share each layer."),
    ] = None,
    pp: Annotated[
        int | None,
        typer.Option("--pp", min=1, max=1024, help="Stages that share the layers."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="The application, where there are several.")
    ] = None,
    address: Address = AUTO,
) -> None:
    """Spread a running engine over another number of workers.

    Its requests wait meanwhile and go on, with the same text; new ones queue. A size that is left
    out stays as it is. When the new workers do not come up, the old ones are started again.

    Examples:

      palimpsest scale --tp 3

      palimpsest scale --tp 2 --pp 2 --name chat --address auto
    """
    if tp is None and pp is None:
        raise CommandError("Say how many workers there shall be, with --tp, --pp or both.")
    found = []
    for cluster in clusters_at(address):
        with joined_cluster(cluster):
            found += [(cluster, app) for app in applications(name)]
    if not found:
        raise no_application(name, address)
    if len(found) > 1:
        apps = ", ".join(sorted(app for _, app in found))
        raise CommandError(f"Several applications run ({apps}): say which one with --name.")
    ((cluster, app),) = found
    with joined_cluster(cluster):
        _scale(app, tp, pp, Progress())


def _scale(app: str, tp: int | None, pp: int | None, progress: Progress) -> None:
    import ray

    from cluster.errors import ResizeError
    from cluster.ray_errors import sentence

    supervisor = applications()[app]
    call = supervisor.resize.remote(tp, pp)
    try:
        with progress.step(f"Resizing {app}") as tell:
            while not ray.wait([call], timeout=_TICK_SECONDS)[0]:
                tell(_reason(supervisor))
            shape = ray.get(call)
    except ray.exceptions.RayTaskError as error:
        if not isinstance(error.cause, ResizeError):
            raise
        raise CommandError(f"{app} is not resized: {sentence(error).rstrip('.')}.") from error
    except ray.exceptions.RayActorError as error:
        raise CommandError(
            f"The supervisor of {app} has ended, so nobody knows what came of it; see "
            f"`palimpsest status`."
        ) from error
    info = ray.get(supervisor.status.remote(), timeout=_ANSWER_SECONDS).info
    progress.say(
        f"{app} runs as {shape} now, with {info.num_blocks - 1} blocks that hold "
        f"{info.capacity_tokens} tokens."
    )


def _reason(supervisor: Any) -> str:
    """What it is waiting for, as far as that can be told."""
    import ray

    try:
        status = ray.get(supervisor.status.remote(), timeout=_ANSWER_SECONDS)
    except ray.exceptions.RayError:
        return ""
    return str(status.info.reason)
