"""`palimpsest stop`: end applications, also those whose `palimpsest serve` was killed."""

import contextlib
from typing import Annotated

import typer

from cluster.errors import CommandError
from cluster.local_ray import (
    AUTO,
    NoClusterError,
    clusters_at,
    joined_cluster,
    remove_remains,
)
from cluster.status_command import Address

_STOP_SECONDS = 30.0


def stop(
    name: Annotated[
        str | None, typer.Option(help="The application to end. Without it: all of them.")
    ] = None,
    address: Address = AUTO,
) -> None:
    """End applications and their engines, and remove what killed commands have left.

    A Ray cluster that was there before stays.

    Examples:

      palimpsest stop

      palimpsest stop --name chat --address auto
    """
    num_killed = remove_remains()
    if num_killed:
        typer.echo(f"Removed what is left of {num_killed} killed `palimpsest serve`.")
    ended = []
    for cluster in clusters_at(address):
        try:
            with joined_cluster(cluster):
                ended += _stop(name)
        except NoClusterError:
            if name is not None or address != AUTO:
                raise
    if ended:
        typer.echo(f"Ended: {', '.join(ended)}.")
    elif name is None:
        typer.echo("No application is running.")
    else:
        raise CommandError(
            f"No application {name} runs on the Ray cluster at {address}; `palimpsest status` "
            f"shows those that do."
        )


def _stop(name: str | None) -> list[str]:
    """The names of the applications that were ended."""
    import ray
    from ray import serve

    from cluster.supervisor import existing_supervisors

    supervisors = existing_supervisors()
    ended = sorted(supervisors) if name is None else [app for app in supervisors if app == name]
    for app in ended:
        # Replicas first: those that lose their supervisor ask for a new one.
        with contextlib.suppress(Exception):  # Serve may have gone, which is what is wanted
            serve.delete(app)
        supervisor = supervisors[app]
        try:
            ray.get(supervisor.stop.remote("palimpsest stop"), timeout=_STOP_SECONDS)
        except ray.exceptions.RayActorError:
            pass  # its death is the answer
        except ray.exceptions.GetTimeoutError:
            ray.kill(supervisor)  # takes its workers with it
    return ended
