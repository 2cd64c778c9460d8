"""`palimpsest stop`: end applications, also those whose `palimpsest serve` was killed."""

from typing import Annotated

import typer

from cluster.app_end import end
from cluster.applications import Address, applications, no_application
from cluster.local_ray import (
    AUTO,
    NoClusterError,
    clusters_at,
    joined_cluster,
    remove_remains,
)


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
        raise no_application(name, address)


def _stop(name: str | None) -> list[str]:
    """The names of the applications that were ended."""
    found = applications(name)
    for app, supervisor in found.items():
        end(app, supervisor, "the server is being stopped")
    return list(found)
