"""`palimpsest stop`: end applications, also those whose `palimpsest serve` was killed."""

from typing import Annotated

import typer

from cluster.app_end import end
from cluster.errors import CommandError
from cluster.local_ray import (
    AUTO,
    NoClusterError,
    clusters_at,
    joined_cluster,
    remove_remains,
)
from cluster.status_command import Address


def stop(
    name: Annotated[
        str | None, typer.Option(help="The application to end. Without it: all of them.")
    ] = None,
    address: Address = AUTO,
) -> None:
    """End applications and their engines, and remove what killed commands have left.

    What runs ends with an error; `palimpsest drain` lets it finish first. A Ray cluster that was
    there before stays.

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
    from cluster.supervisor import existing_supervisors

    supervisors = existing_supervisors()
    ended = sorted(supervisors) if name is None else [app for app in supervisors if app == name]
    for app in ended:
        end(app, supervisors[app], "the server is being stopped")
    return ended
