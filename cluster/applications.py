"""The applications of a Ray cluster, as the commands that look after them find them."""

from typing import Annotated, Any

import typer

from cluster.errors import CommandError

Address = Annotated[
    str,
    typer.Option(
        help="Ray cluster to look at; `auto` stands for those that `palimpsest serve` has started "
        "on this machine, or else the one that Ray finds here."
    ),
]


def applications(name: str | None = None) -> dict[str, Any]:
    """The supervisors of the cluster that was joined, by application; of `name` alone if given."""
    from cluster.supervisor import existing_supervisors

    found = existing_supervisors()
    return {app: found[app] for app in sorted(found) if name in (None, app)}


def no_application(name: str | None, address: str) -> CommandError:
    which = "No application" if name is None else f"No application {name}"
    return CommandError(
        f"{which} runs on the Ray cluster at {address}; `palimpsest status` shows those that do, "
        f"and `palimpsest serve` starts one."
    )
