"""`palimpsest drain`: take nothing new, finish what runs."""

from typing import Annotated, Any

import typer

from cluster.app_end import drain as drain_apps
from cluster.console import Progress
from cluster.errors import CommandError
from cluster.local_ray import AUTO, clusters_at, joined_cluster
from cluster.status_command import Address

_REASON = "the server is being drained"
_ANSWER_SECONDS = 30.0


def drain(
    name: Annotated[
        str | None, typer.Option(help="The application to drain. Without it: all of them.")
    ] = None,
    address: Address = AUTO,
    seconds: Annotated[
        float | None,
        typer.Option(
            min=0, help="How long what runs may go on. Unset: the server's server.drain_seconds."
        ),
    ] = None,
    undo: Annotated[bool, typer.Option("--undo", help="Take requests again.")] = False,
) -> None:
    """Let applications take no new requests and finish those they have, and wait for it.

    New requests are answered with 503 and Retry-After, and /ready says 503 and `draining`, so that
    whatever stands in front sends them elsewhere. Accepted requests go on, also those that wait in
    the queue; what is left when the time is over ends with an error. Then the engine stands by
    with the model in its memory: `palimpsest drain --undo` lets it take requests again,
    `palimpsest stop` ends it. Ctrl-C ends the waiting, not the drain.

    Examples:

      palimpsest drain && palimpsest stop

      palimpsest drain --name chat --seconds 60

      palimpsest drain --undo
    """
    found = []
    for cluster in clusters_at(address):
        with joined_cluster(cluster):
            supervisors = _supervisors(name)
            found += list(supervisors)
            if undo:
                _undo(supervisors)
            elif supervisors:
                _drain(supervisors, seconds)
    if not found:
        which = "No application" if name is None else f"No application {name}"
        raise CommandError(
            f"{which} runs on the Ray cluster at {address}; `palimpsest status` shows those that "
            f"do."
        )


def _supervisors(name: str | None) -> dict[str, Any]:
    from cluster.supervisor import existing_supervisors

    found = existing_supervisors()
    return {app: one for app, one in sorted(found.items()) if name is None or app == name}


def _drain(supervisors: dict[str, Any], seconds: float | None) -> None:
    progress = Progress()
    with progress.step(f"Draining {', '.join(supervisors)}") as tell:
        ended = drain_apps(supervisors, _REASON, seconds, tell)
    for app, num_ended in ended.items():
        if num_ended is None:
            progress.say(
                f"{app} was not drained to the end: it takes requests again, has failed or has "
                f"gone; `palimpsest status` tells which."
            )
        else:
            was = f"{num_ended} requests had to be ended" if num_ended else "no request was cut off"
            progress.say(f"{app} is drained, {was}.")


def _undo(supervisors: dict[str, Any]) -> None:
    import ray

    for app, supervisor in supervisors.items():
        try:
            ray.get(supervisor.undrain.remote(), timeout=_ANSWER_SECONDS)
        except ray.exceptions.RayError as error:
            raise CommandError(
                f"The supervisor of {app} does not answer; `palimpsest status` tells more."
            ) from error
        Progress().say(f"{app} takes requests again.")
