"""The scheduler core has no clock, no threads, no I/O, and knows no runtime."""

import ast
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
FORBIDDEN = {"torch", "ray", "asyncio", "threading", "time", "os"}
AROUND_THE_CORE = {
    "__main__",
    "actor",
    "clients",
    "engine_record",
    "event_loop",
    "replay",
    "simulate",
    "step_loop",
}


def core_modules() -> list[Path]:
    scheduler = REPOSITORY / "scheduler"
    return [
        path
        for path in sorted(scheduler.rglob("*.py"))
        if Path(path.relative_to(scheduler).parts[0]).stem not in AROUND_THE_CORE
    ]


def forbidden_imports(source: str, name: str) -> Iterator[str]:
    """`file:line: module` for each, wherever in the code it stands."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                modules = [alias.name for alias in names]
            case ast.ImportFrom(module=str(module), level=0):
                modules = [module]
            case _:
                continue
        for module in modules:
            if module.partition(".")[0] in FORBIDDEN:
                yield f"{name}:{node.lineno}: {module}"


def test_the_core_imports_no_runtime_clock_or_io() -> None:
    modules = core_modules()
    assert {"core.py", "steps.py"} <= {path.name for path in modules}
    found = [
        entry
        for path in modules
        for entry in forbidden_imports(path.read_text(), str(path.relative_to(REPOSITORY)))
    ]
    assert not found, "\n".join(found)


def test_hidden_imports_are_found() -> None:
    source = """
import json, os.path
from time import monotonic

def later():
    if True:
        import ray.util as anything
    from . import time
    from collections import threading
"""
    assert list(forbidden_imports(source, "x.py")) == [
        "x.py:2: os.path",
        "x.py:3: time",
        "x.py:7: ray.util",
    ]
