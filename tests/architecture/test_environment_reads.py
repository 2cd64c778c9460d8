"""Environment variables are read in `configs` alone, where their names and errors are."""

import ast
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
OTHERS = ("cluster", "scheduler", "worker")


def environment_reads(source: str, name: str) -> Iterator[str]:
    """`file:line` for each. Setting a variable, or handing all of them on, is no reading."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt | ast.expr) and _reads_environment(node):
            yield f"{name}:{node.lineno}"


def _reads_environment(node: ast.AST) -> bool:
    match node:
        case ast.ImportFrom(module="os"):
            return any(alias.name in ("environ", "getenv") for alias in node.names)
        case ast.Attribute():
            return ast.unparse(node) in ("os.environ.get", "os.getenv")
        case ast.Subscript(ctx=ast.Load()):
            return ast.unparse(node.value) == "os.environ"
        case ast.Compare():
            return any(ast.unparse(operand) == "os.environ" for operand in node.comparators)
    return False


def test_only_configs_reads_the_environment() -> None:
    found = [
        entry
        for package in OTHERS
        for path in sorted((REPOSITORY / package).rglob("*.py"))
        for entry in environment_reads(path.read_text(), str(path.relative_to(REPOSITORY)))
    ]
    assert not found, "\n".join(found)


def test_reads_are_found() -> None:
    source = """\
import os
from os import path
from os import environ
a = os.environ["A"]
b = os.environ.get("B")
c = os.getenv("C")
d = "D" in os.environ
os.environ["E"] = "1"
f = {**os.environ, "F": "1"}
"""
    assert sorted(environment_reads(source, "x.py")) == [f"x.py:{line}" for line in range(3, 8)]
