"""Typed access to the fields of a `config.json`, with an error that names the field."""

import json
from collections.abc import Mapping
from pathlib import Path

from worker.models.errors import BrokenModelError


class Fields:
    """The fields of one JSON object. A value of null counts as absent."""

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self._values = values
        self.where = where
        """What the error messages call this object."""

    @classmethod
    def read(cls, path: Path) -> "Fields":
        """Raises BrokenModelError where `path` is missing or is no JSON object."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise BrokenModelError(
                f"{path.parent} has no {path.name}, so it is no model."
            ) from None
        except (OSError, ValueError) as error:
            raise BrokenModelError(f"{path} cannot be read as JSON: {error}.") from error
        if not isinstance(values, dict):
            raise BrokenModelError(f"{path} holds no JSON object.")
        return cls(values, str(path))

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def get(self, name: str) -> object:
        return self._values.get(name)

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._present(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._mistyped(name, "an integer", value)
        return value

    def positive(self, name: str, default: int | None = None) -> int:
        value = self.integer(name, default)
        if value < 1:
            raise self._mistyped(name, "a positive integer", value)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._present(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._mistyped(name, "a number", value)
        return float(value)

    def flag(self, name: str, default: bool | None = None) -> bool:
        value = self._present(name, default)
        if not isinstance(value, bool):
            raise self._mistyped(name, "true or false", value)
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._present(name, default)
        if not isinstance(value, str):
            raise self._mistyped(name, "a string", value)
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """The strings of a list; empty where the field is absent."""
        value = self._values.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._mistyped(name, "a list of strings", value)
        return tuple(value)

    def integers(self, name: str) -> tuple[int, ...]:
        """The integers of a list; empty where the field is absent."""
        value = self._values.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
            raise self._mistyped(name, "a list of integers", value)
        return tuple(value)

    def text_values(self) -> dict[str, str]:
        """All fields, every one of which must be a string."""
        return {name: self.text(name) for name in self._values}

    def nested(self, name: str) -> "Fields | None":
        """The nested object, or None where the field is absent."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._mistyped(name, "an object", value)
        return Fields(value, f"{name!r} in {self.where}")

    def _present(self, name: str, default: object) -> object:
        value = self._values.get(name)
        if value is None:
            value = default
        if value is None:
            raise BrokenModelError(f"{self.where} has no field {name!r}.")
        return value

    def _mistyped(self, name: str, wanted: str, value: object) -> BrokenModelError:
        return BrokenModelError(f"{self.where} says {name!r} is {value!r}, which is not {wanted}.")


def read_architecture(fields: Fields) -> str:
    """The class name of the model, e.g. "LlamaForCausalLM"."""
    architectures = fields.texts("architectures")
    if not architectures:
        raise BrokenModelError(f"{fields.where} has no field 'architectures'.")
    return architectures[0]
