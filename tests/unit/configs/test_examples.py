"""Every file that people copy loads, and says something."""

from pathlib import Path

import pytest

import configs
from configs import Device, load, resolve

EXAMPLES = sorted((Path(configs.__file__).parent / "examples").glob("*.yaml"))


def device_of(example: Path) -> Device:
    return "cpu" if example.stem in ("cpu-demo", "memory-pressure") else "cuda"


def test_the_examples_are_these() -> None:
    assert [path.stem for path in EXAMPLES] == [
        "chat-priority",
        "cpu-demo",
        "memory-pressure",
        "one-gpu",
        "tp4",
        "tp8-pp2",
    ]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_loads(example: Path) -> None:
    loaded = load(example, (), {})
    resolve(loaded.config, device_of(example))
    given = [source for source in loaded.sources.values() if source.kind == "file"]
    assert len(given) >= 2
    assert example.read_text().startswith("# ")
