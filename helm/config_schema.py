"""The JSON schema of `config` in the chart's values, from the definitions of the settings."""

from typing import Any

from configs.settings import Setting, all_settings, sections

DECIDED = frozenset(
    {"server.host", "server.port", "server.allow_no_auth", "server.num_replicas", "parallel.device"}
)
"""What the chart sets itself; keys are left out too, as they never stand in plain values."""

# Helm reads numbers as floats, which are whole up to here.
_MAX_WHOLE = 2**53 - 1
_BYTE_SIZE = r"^[0-9.]+ ?([kKMGTP]i?)?B$"
_KEYWORDS = {
    "ge": "minimum",
    "gt": "exclusiveMinimum",
    "le": "maximum",
    "lt": "exclusiveMaximum",
}
_TYPES = {"bool": "boolean", "int": "integer", "float": "number", "str": "string"}


def config_schema() -> dict[str, Any]:
    """A schema that refuses unknown names and what is out of range. Null unsets a setting."""
    return _object({section: _section(section) for section in sections()}) | {
        "description": "Settings of Palimpsest, as in docs/configuration.md.",
        "required": ["model", "server"],
    }


def _section(section: str) -> dict[str, Any]:
    settings = [
        setting
        for setting in all_settings().values()
        if setting.section == section and not setting.secret and setting.name not in DECIDED
    ]
    return _object({setting.key: _setting(setting) for setting in settings})


def _setting(setting: Setting) -> dict[str, Any]:
    value = _value(setting)
    if setting.is_list:
        value = {"type": "array", "items": value}
    return value | {"description": setting.description}


def _value(setting: Setting) -> dict[str, Any]:
    if setting.choices:
        return {"enum": list(setting.choices)}
    kind = setting.kind.__name__
    if kind == "ByteSize":
        return {"type": ["integer", "string"], "exclusiveMinimum": 0, "pattern": _BYTE_SIZE}
    bounds = {_KEYWORDS[bound]: limit for bound, limit in setting.bounds.items()}
    if kind == "int":
        bounds["maximum"] = min(bounds.get("maximum", _MAX_WHOLE), _MAX_WHOLE)
    if kind == "str":
        bounds["minLength"] = 1
    return {"type": _TYPES[kind], **bounds}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": properties}
