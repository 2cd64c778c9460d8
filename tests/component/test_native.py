"""Kernels built on first use: cached, shared by processes, and not needed where they cannot be."""

import logging
import platform
import shutil
import subprocess
from collections.abc import Generator
from pathlib import Path

import platformdirs
import pytest
import torch

from worker import native
from worker.attention.select import select_attention
from worker.errors import BackendUnavailableError, DeviceError


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Path]:
    """As on a machine where nothing was built yet."""
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda _: tmp_path)
    native.load.cache_clear()
    yield tmp_path
    native.load.cache_clear()


def compile_kernel(name: str, *options: str) -> str:
    """What the compiler prints, with `options` after those of a build."""
    compiler = next(path for path in map(shutil.which, native._COMPILERS) if path)
    source = Path(native.__file__).with_name(f"{name}.cpp")
    command = [compiler, *native._FLAGS, *options, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def built(folder: Path) -> list[Path]:
    return sorted((folder / "native").glob("*.so"))


def test_a_kernel_is_built_once(empty_cache: Path) -> None:
    native.load("collectives")
    [library] = built(empty_cache)
    made = library.stat().st_mtime_ns
    native.load.cache_clear()
    native.load("collectives")
    assert built(empty_cache) == [library]
    assert library.stat().st_mtime_ns == made


OTHER_CPUS = ("x86-64-v3", "skylake-avx512") if platform.machine() == "x86_64" else ("native",)
KERNELS = sorted(path.stem for path in Path(native.__file__).parent.glob("*.cpp"))


@pytest.mark.parametrize("cpu", OTHER_CPUS)
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile_for_other_cpus(name: str, cpu: str) -> None:
    """They choose by what a CPU has; what is not chosen here nobody would compile."""
    compile_kernel(name, f"-march={cpu}", "-fsyntax-only")


def test_fetching_ahead_is_not_optimized_away() -> None:
    """gcc drops calls of a function that does nothing but prefetch, if it is not inlined."""
    assembly = compile_kernel("attention", "-S", "-o", "-")
    assert ("prefetcht0" if platform.machine() == "x86_64" else "prfm") in assembly


def test_without_a_compiler_the_reference_takes_over(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(BackendUnavailableError, match="needs a C\\+\\+ compiler"):
        native.load("attention")
    with caplog.at_level(logging.WARNING):
        backend = select_attention(torch.device("cpu"), torch.float32, torch.float32)
    assert backend.name == "reference"
    assert "falls back to the slow reference" in caplog.text


def test_a_compiler_that_fails_is_told_with_what_it_said(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "_FLAGS", ("-std=c++98",))
    with pytest.raises(BackendUnavailableError, match=r"could not build .*error"):
        native.load("attention")
    assert built(empty_cache) == []


def test_a_device_without_attention_is_refused() -> None:
    with pytest.raises(DeviceError, match="use cpu or cuda"):
        select_attention(torch.device("meta"), torch.float32, torch.float32)
