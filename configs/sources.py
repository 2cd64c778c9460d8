"""Readers of the three places that settings come from, each giving entries in one form.

Nothing else in the project reads environment variables.
"""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

from configs.errors import ConfigError
from configs.settings import Setting, all_settings, sections

ENVIRONMENT_PREFIX = "PALIMPSEST_"
ENVIRONMENT = {
    "PALIMPSEST_API_KEYS": "server.api_keys",
    "PALIMPSEST_ADMIN_KEY": "server.admin_key",
}


@dataclass(frozen=True, slots=True)
class Source:
    """Where a value was given."""

    kind: Literal["default", "file", "environment", "--set"]
    detail: str = ""
    """File and line, or the name of the variable."""

    def __str__(self) -> str:
        return self.detail or self.kind


DEFAULT = Source("default")


@dataclass(frozen=True, slots=True)
class Entry:
    """A value that somebody gave for a setting; neither name nor value is checked yet."""

    name: str
    """As written: `section.key`, or only `section` when it holds no keys."""
    value: object
    source: Source


def read_file(path: Path) -> Iterator[Entry]:
    """The entries of a YAML file; raises ConfigError, with file and line, if it is none."""
    for section, section_node, line in _pairs(_parse(path), path, within=""):
        if isinstance(section_node, yaml.MappingNode):
            for key, node, key_line in _pairs(section_node, path, within=f" in {section}"):
                source = Source("file", f"{path}:{key_line}")
                yield Entry(f"{section}.{key}", _construct(node, source), source)
        elif section not in sections() or not _is_null(section_node):
            source = Source("file", f"{path}:{line}")
            yield Entry(section, _construct(section_node, source), source)


def read_environment(environ: Mapping[str, str]) -> Iterator[Entry]:
    """The keys of the server. A variable that is set but holds none is an error, not "no keys"."""
    _check_names(environ)
    for variable, name in ENVIRONMENT.items():
        if variable not in environ:
            continue
        source = Source("environment", variable)
        text = environ[variable].strip()
        if all_settings()[name].is_list:
            keys = [key.strip() for key in text.split(",") if key.strip()]
            if not keys:
                raise ConfigError(f"{variable} is set but holds no key: unset it, or give it one.")
            yield Entry(name, keys, source)
        elif text:
            yield Entry(name, text, source)
        else:
            raise ConfigError(f"{variable} is set but empty: unset it, or give it a key.")


def read_overrides(overrides: Sequence[str]) -> Iterator[Entry]:
    """The entries of `--set section.key=value`, their values read as the setting's type asks."""
    for override in overrides:
        name, equals, text = (part.strip() for part in override.partition("="))
        setting = all_settings().get(name)
        if setting is not None and setting.secret:
            raise ConfigError(
                f"{name} cannot be given on the command line, where every user of the machine "
                f"could read it: put it into the configuration file or into {_variable(name)}."
            )
        if not equals or not name:
            raise ConfigError(f"--set {override} must have the form section.key=value.")
        if not text:
            raise ConfigError(f"--set {override} gives no value; null unsets a setting.")
        yield Entry(name, _from_text(text, setting), Source("--set"))


def _parse(path: Path) -> yaml.Node | None:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text in UTF-8, at byte {error.start}.") from error
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise ConfigError(f"{path}:{line}: this is no valid YAML: {_problem(error)}.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is no valid YAML: {_problem(error)}.") from None


def _pairs(
    node: yaml.Node | None, path: Path, *, within: str
) -> Iterator[tuple[str, yaml.Node, int]]:
    """Key, value and line number of a mapping, each key once."""
    if node is None or _is_null(node):
        return
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(
            f"{path}:{node.start_mark.line + 1}: a configuration file holds sections "
            f"(model:, cache:, …) with settings in them, and nothing else."
        )
    lines: dict[str, int] = {}
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            line = key_node.start_mark.line + 1
            raise ConfigError(f"{path}:{line}: the name of a section or setting must be a text.")
        key, line = str(key_node.value), key_node.start_mark.line + 1
        if key in lines:
            raise ConfigError(
                f"{path}:{line}: {key} appears twice{within}, before in line {lines[key]}: "
                f"keep one of them."
            )
        lines[key] = line
        yield key, value_node, line


def _problem(error: Exception) -> str:
    """What is wrong, without words quoted from the file: one of them may be a key.

    For the same reason the error itself, which quotes a whole line, is not chained to ours.
    """
    text = " ".join(str(getattr(error, "problem", None) or error).split())
    return re.sub(r" '(?![<\\])[^']{2,}'", "", text)


def _is_null(node: yaml.Node) -> bool:
    return bool(node.tag == "tag:yaml.org,2002:null")


def _construct(node: yaml.Node, source: Source) -> object:
    loader = yaml.SafeLoader("")
    try:
        value: object = loader.construct_object(node, deep=True)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{source}: this value cannot be read: {_problem(error)}.") from None
    finally:
        loader.dispose()
    return value


def _from_text(text: str, setting: Setting | None) -> object:
    if text in ("null", "~"):
        return None
    if setting is not None and setting.kind is str:
        return _list_from_text(text) if setting.is_list else text
    try:
        value: object = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if setting is not None and setting.kind is float and isinstance(value, str):
        # YAML takes 1e-3 for a text.
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _list_from_text(text: str) -> object:
    """`a` or `[a, b]`, with every item a text: a model may be called 1.5."""
    try:
        value: object = yaml.load(text, Loader=yaml.BaseLoader) if text.startswith("[") else text
    except yaml.YAMLError:
        return text
    return value


def _variable(name: str) -> str:
    return next(variable for variable, target in ENVIRONMENT.items() if target == name)


def _check_names(environ: Mapping[str, str]) -> None:
    """A misspelt key variable would start a server without keys.

    Only names close to ours are refused: Kubernetes itself puts variables like
    PALIMPSEST_SERVICE_HOST into the pods beside a service of this name.
    """
    known = {variable.removeprefix(ENVIRONMENT_PREFIX): variable for variable in ENVIRONMENT}
    for variable in environ:
        if variable.startswith(ENVIRONMENT_PREFIX) and variable not in ENVIRONMENT:
            word = variable.removeprefix(ENVIRONMENT_PREFIX)
            if near := difflib.get_close_matches(word, known, n=1, cutoff=0.7):
                raise ConfigError(
                    f"The environment variable {variable} means nothing here: did you mean "
                    f"{known[near[0]]}?"
                )
