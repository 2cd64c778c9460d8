"""`palimpsest config`: every setting, the value that holds, and where it came from."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from configs import Device, LoadedConfig, load, resolve
from configs.reference import markdown, show_by_device, value_by_device, value_of
from configs.settings import Setting, all_settings, sections, show

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="YAML file with settings, see configs/examples."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="SECTION.KEY=VALUE", help="One setting; wins over the file. Repeatable."
    ),
]


def config(
    config_file: ConfigFile = None,
    overrides: Overrides = None,
    device: Annotated[
        Device | None, typer.Option(help="Show the values for this device only.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the reference page of all settings.")
    ] = False,
) -> None:
    """Print every setting: its value, where that came from, and what it means.

    Nothing is started: this is also how to check a configuration before using it.

    Examples:

      palimpsest config

      palimpsest config --config my.yaml --set cache.num_blocks=4096

      palimpsest config --config my.yaml --device cpu --json
    """
    if as_markdown:
        typer.echo(markdown())
        return
    loaded = load(config_file, overrides or ())
    if as_json:
        typer.echo(json.dumps(_as_json(loaded, device), indent=2))
    else:
        _print_tables(loaded, device)


def _print_tables(loaded: LoadedConfig, device: Device | None) -> None:
    console = Console()
    for section in sections():
        table = Table(
            title=section,
            title_justify="left",
            title_style="bold",
            box=box.SIMPLE_HEAD,
            expand=True,
        )
        table.add_column("setting", no_wrap=True)
        table.add_column("value", overflow="fold", ratio=2)
        table.add_column("source", overflow="fold", ratio=2)
        table.add_column("meaning", overflow="fold", ratio=6)
        for setting in all_settings().values():
            if setting.section == section:
                source = loaded.sources[setting.name]
                given = source.kind != "default"
                table.add_row(
                    setting.key,
                    _value_text(loaded, setting, device),
                    str(source),
                    setting.description,
                    style="bold" if given else None,
                )
        console.print(table)


def _value_text(loaded: LoadedConfig, setting: Setting, device: Device | None) -> str:
    if device is not None:
        return show(value_of(resolve(loaded.config, device), setting))
    return show_by_device(value_by_device(loaded.config, setting))


def _as_json(loaded: LoadedConfig, device: Device | None) -> dict[str, Any]:
    """Without a device, values that depend on it are null."""
    holds = loaded.config if device is None else resolve(loaded.config, device)
    return {
        "device": device,
        "settings": {
            name: {
                "value": show(value) if setting.secret else value,
                "source": loaded.sources[name].kind,
                "where": loaded.sources[name].detail or None,
            }
            for name, setting in all_settings().items()
            for value in [value_of(holds, setting)]
        },
    }
