"""From a file, the environment and the command line to a checked configuration.

What comes later wins: the file, then the environment, then `--set`.
"""

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from configs.errors import ConfigError
from configs.sections import Config, Section
from configs.settings import Setting, all_settings, nearest_name, sections, show
from configs.sources import (
    DEFAULT,
    Entry,
    Source,
    read_environment,
    read_file,
    read_overrides,
)


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration, and for every setting by its full name where its value came from."""

    config: Config
    sources: Mapping[str, Source]


def load(
    path: Path | None = None,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> LoadedConfig:
    """Read and check all settings; `environ` defaults to the environment of the process.

    Raises ConfigError with one line for each problem: unknown names, values that are out of
    range or of the wrong type, and a file that is no YAML. Whether the settings go together
    depends on the device, so `configs.resolve` decides that.
    """
    entries = [
        *(read_file(path) if path is not None else ()),
        *read_environment(os.environ if environ is None else environ),
        *read_overrides(overrides),
    ]
    given = {entry.name: entry for entry in entries}
    problems = [problem for entry in given.values() if (problem := _unknown(entry))]
    if problems:
        raise ConfigError("\n".join(problems))
    config = _validated(given)
    return LoadedConfig(config, _sources(given))


def _sources(given: Mapping[str, Entry]) -> Mapping[str, Source]:
    return {name: given[name].source if name in given else DEFAULT for name in all_settings()}


def _unknown(entry: Entry) -> str | None:
    """The sentence about a name that does not exist, or None."""
    if entry.name in all_settings():
        return None
    section, _, key = entry.name.partition(".")
    if entry.name in sections():
        return (
            f"{section} ({entry.source}) is a section: it holds settings such as "
            f"{next(name for name in all_settings() if name.startswith(section))}, and has no "
            f"value of its own."
        )
    nearest = nearest_name(entry.name)
    hint = f"did you mean {nearest}?" if nearest else "`palimpsest config` lists all settings."
    if key and section not in sections():
        known = ", ".join(sections())
        return f"{entry.name} ({entry.source}) is unknown (the sections are {known}): {hint}"
    return f"{entry.name} ({entry.source}) is unknown: {hint}"


def _validated(given: Mapping[str, Entry]) -> Config:
    built: dict[str, Section] = {}
    problems: dict[str, str] = {}
    for section, model in sections().items():
        values = {
            name.partition(".")[2]: entry.value
            for name, entry in given.items()
            if name.startswith(f"{section}.")
        }
        try:
            built[section] = model.model_validate(values)
        except ValidationError as error:
            for detail in error.errors(include_url=False, include_input=False):
                name = f"{section}.{detail['loc'][0]}"
                problems.setdefault(name, _wrong_value(all_settings()[name], given[name]))
    if problems:
        raise ConfigError("\n".join(problems.values()))
    return Config.model_validate(built)


def _wrong_value(setting: Setting, entry: Entry) -> str:
    if setting.secret:
        return f"{setting.name} ({entry.source}) has a wrong value: it must be {setting.allowed}."
    value = "null" if entry.value is None else show(entry.value)
    if isinstance(entry.value, str) and not setting.choices:
        value = f'the text "{value}"'
    return (
        f"{setting.name} is {value} ({entry.source}), but must be {setting.allowed}"
        f"{_value_hint(setting, entry)}."
    )


def _value_hint(setting: Setting, entry: Entry) -> str:
    if setting.choices and isinstance(entry.value, str):
        nearest = difflib.get_close_matches(entry.value, setting.choices, n=1)
        return f" (did you mean {nearest[0]}?)" if nearest else ""
    # YAML decides by the quotes what is a number, which is easy to get wrong.
    if entry.source.kind != "file":
        return ""
    if setting.kind is str and isinstance(entry.value, bool | int | float):
        return ": put it in quotes"
    if setting.kind in (int, float) and isinstance(entry.value, str):
        try:
            TypeAdapter(setting.kind).validate_python(entry.value)
        except ValidationError:
            return ""
        return ": leave the quotes out"
    return ""
