"""Custom resources against their definition, as an API server would check them, offline.

Stricter than one in this: a field that the definition does not know is an error, where a server
would silently drop it.
"""

from collections.abc import Iterator
from typing import Any

import jsonschema


def problems(definition: dict[str, Any], resource: dict[str, Any]) -> list[str]:
    """What is wrong with `resource`, of which `definition` is the CustomResourceDefinition."""
    group = definition["spec"]["group"]
    for version in definition["spec"]["versions"]:
        if resource["apiVersion"] == f"{group}/{version['name']}":
            structure = version["schema"]["openAPIV3Schema"]
            break
    else:
        return [f"there is no version {resource['apiVersion']}"]
    schema = _json_schema(structure)
    schema["properties"]["metadata"] = {"type": "object", "required": ["name"]}
    errors = jsonschema.Draft202012Validator(schema).iter_errors(resource)
    found = [f"{error.json_path}: {error.message[:200]}" for error in errors]
    return found + [
        f"{path}: the rule {rule} is not checked here"
        for path, rule in _rules(structure, resource, "$")
    ]


def _json_schema(structure: dict[str, Any]) -> dict[str, Any]:
    """A JSON schema that says the same as a structural schema of Kubernetes."""
    schema = dict(structure)
    if schema.pop("x-kubernetes-int-or-string", False):
        schema.pop("type", None)
        schema["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if schema.pop("nullable", False) and "type" in schema:
        schema["type"] = [schema["type"], "null"]
    if "properties" in schema:
        schema["properties"] = {
            name: _json_schema(inner) for name, inner in schema["properties"].items()
        }
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            schema.setdefault("additionalProperties", False)
    for key in ("additionalProperties", "items"):
        if isinstance(schema.get(key), dict):
            schema[key] = _json_schema(schema[key])
    return schema


def _rules(structure: dict[str, Any], value: Any, path: str) -> Iterator[tuple[str, str]]:
    """CEL rules on what `value` has, but for those that compare it with what was there before."""
    for rule in structure.get("x-kubernetes-validations", []):
        if "oldSelf" not in rule["rule"]:
            yield path, rule["rule"]
    if isinstance(value, dict):
        for name, inner in value.items():
            known = structure.get("properties", {}).get(name)
            known = known or structure.get("additionalProperties")
            if isinstance(known, dict):
                yield from _rules(known, inner, f"{path}.{name}")
    elif isinstance(value, list) and isinstance(structure.get("items"), dict):
        for number, inner in enumerate(value):
            yield from _rules(structure["items"], inner, f"{path}[{number}]")
