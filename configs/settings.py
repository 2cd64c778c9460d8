"""What the sections say about each setting, in words: the one source of errors and docs."""

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import ByteSize, SecretStr
from pydantic.fields import FieldInfo

from configs.errors import one_of
from configs.sections import Config, Section

MAX_SHOWN_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of one section."""

    section: str
    key: str
    default: object
    description: str
    kind: type
    """int, float, bool, str, ByteSize, SecretStr; Literal settings have str."""
    choices: tuple[str, ...]
    """Empty: no fixed choices."""
    bounds: Mapping[str, float]
    """Of gt, ge, lt, le those that are set."""
    is_list: bool
    optional: bool
    """Whether it may be null."""

    @property
    def name(self) -> str:
        return f"{self.section}.{self.key}"

    @property
    def secret(self) -> bool:
        return self.kind is SecretStr

    @property
    def allowed(self) -> str:
        """What a value must be, to go after "must be"."""
        text = self._allowed_item()
        if self.is_list:
            text = f"a list of {text}s, none of them empty"
        return f"{text}, or null" if self.optional else text

    def _allowed_item(self) -> str:
        if self.choices:
            return one_of(self.choices)
        match self.kind.__name__:
            case "bool":
                return "true or false"
            case "int":
                return f"a whole number{self._range()}"
            case "float":
                return f"a number{self._range()}"
            case "ByteSize":
                return f"a number of bytes{self._range()}, or a text with a unit such as 1GiB"
        return "text" if self.is_list else "a text, not empty"

    def _range(self) -> str:
        low = self.bounds.get("ge")
        above, high = self.bounds.get("gt"), self.bounds.get("le")
        if low is not None and high is not None:
            return f" from {low} to {high}"
        lower = f"of at least {low}" if low is not None else ""
        lower = f"above {above}" if above is not None else lower
        upper = f"at most {high}" if high is not None else ""
        text = " and ".join(part for part in (lower, upper) if part)
        return f" {text}" if text else ""


@cache
def all_settings() -> Mapping[str, Setting]:
    """Every setting by its full name, in the order of the definitions."""
    settings = [
        _setting(section, key, field)
        for section, model in sections().items()
        for key, field in model.model_fields.items()
    ]
    return {setting.name: setting for setting in settings}


@cache
def sections() -> Mapping[str, type[Section]]:
    found = {}
    for name, field in Config.model_fields.items():
        assert isinstance(field.annotation, type)
        assert issubclass(field.annotation, Section)
        found[name] = field.annotation
    return found


def nearest_name(name: str) -> str | None:
    """The known setting that somebody who wrote `name` most likely meant."""
    known = all_settings()
    key = name.rpartition(".")[2].replace("-", "_")
    by_key = {setting.key: setting.name for setting in known.values()}
    if key in by_key:
        return by_key[key]
    if found := difflib.get_close_matches(name, known, n=1, cutoff=0.75):
        return found[0]
    found = difflib.get_close_matches(key, by_key, n=1, cutoff=0.7)
    return by_key[found[0]] if found else None


def show(value: object) -> str:
    """A value for people. Secrets are counted, never shown."""
    match value:
        case None:
            return "unset"
        case ByteSize():
            return value.human_readable()
        case SecretStr():
            return "set (not shown)"
        case (SecretStr(), *rest):
            return f"{len(rest) + 1} set (not shown)"
        case ():
            return "unset"
        case tuple():
            return ", ".join(map(str, value))
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= MAX_SHOWN_CHARACTERS else text[: MAX_SHOWN_CHARACTERS - 1] + "…"


def _setting(section: str, key: str, field: FieldInfo) -> Setting:
    annotation, optional = _without_none(field.annotation)
    bounds = {
        bound: getattr(constraint, bound)
        for constraint in field.metadata
        for bound in ("gt", "ge", "lt", "le")
        if hasattr(constraint, bound)
    }
    is_list = get_origin(annotation) is tuple
    if is_list:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    choices = get_args(annotation) if get_origin(annotation) is Literal else ()
    return Setting(
        section=section,
        key=key,
        default=field.get_default(),
        description=" ".join((field.description or "").split()),
        kind=str if choices else annotation,
        choices=choices,
        bounds=bounds,
        is_list=is_list,
        optional=optional,
    )


def _without_none(annotation: Any) -> tuple[Any, bool]:
    if get_origin(annotation) not in (Union, UnionType):
        return annotation, False
    (rest,) = (part for part in get_args(annotation) if part is not NoneType)
    return rest, True
