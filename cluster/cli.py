"""The command `palimpsest`: collects the subcommands and tells people about errors.

A subcommand is a function in a module of its own; it is added in `_app` and imports what is slow
to import in its body.
"""

import sys
from importlib.metadata import version
from typing import Annotated

import typer

from cluster.bench_command import bench
from cluster.chaos_command import chaos
from cluster.config_command import config
from cluster.drain_command import drain
from cluster.errors import CommandError
from cluster.pull_command import pull
from cluster.scale_command import scale
from cluster.serve_command import serve
from cluster.simulation_command import simulate
from cluster.status_command import status
from cluster.stop_command import stop
from configs import ConfigError


def main() -> None:
    """Run the command line of this process. Never returns.

    Exit codes: 0 done, 1 a fault of ours (with a traceback), 2 the user can change something.
    """
    try:
        _app()()
    except (CommandError, ConfigError) as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2)


def _app() -> typer.Typer:
    app = typer.Typer(
        name="palimpsest",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    app.command()(serve)
    app.command()(status)
    app.command()(scale)
    app.command()(drain)
    app.command()(stop)
    app.command()(pull)
    app.command()(bench)
    app.command()(chaos)
    app.command()(simulate)
    app.command()(config)
    return app


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(version("palimpsest"))
        raise typer.Exit


def _root(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Serve language models on a Ray cluster. Every interruption is a preemption."""
