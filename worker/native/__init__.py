"""Small C++ kernels for CPUs, built on first use with the machine's own compiler.

Plain C functions over pointers, called through ctypes: building takes seconds because no
torch header is read, and a call costs a microsecond. They use the OpenMP runtime that torch
has loaded, so both share one set of threads. Without a compiler callers fall back to torch.
"""

import ctypes
import fcntl
import hashlib
import logging
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import platformdirs
import torch  # noqa: F401  loads the OpenMP runtime that the kernels are bound to

from worker.errors import BackendUnavailableError

logger = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp",
    "-shared",
    "-fPIC",
    # Users' compilers warn of things that are none: gcc 12 of its own AVX-512 header.
    "-w",
)
_COMPILERS = ("g++", "clang++", "c++")
_BUILD_TIMEOUT_SECONDS = 300


@cache
def load(name: str) -> ctypes.CDLL:
    """The library made from `<name>.cpp`; builds it unless a build for this CPU is cached.

    Raises BackendUnavailableError when there is no compiler, or it fails.
    """
    return ctypes.CDLL(str(_built(name)))


def _built(name: str) -> Path:
    sources = [_SOURCES / f"{name}.cpp", *sorted(_SOURCES.glob("*.hpp"))]
    compiler = next((path for path in map(shutil.which, _COMPILERS) if path), None)
    if compiler is None:
        raise BackendUnavailableError(
            f"the CPU kernel {name!r} needs a C++ compiler, and none of "
            f"{', '.join(_COMPILERS)} is installed"
        )
    key = hashlib.sha256("\0".join((compiler, *_FLAGS, _cpu())).encode())
    for source in sources:
        key.update(source.read_bytes())
    folder = _cache_folder()
    library = folder / f"{name}-{key.hexdigest()[:16]}.so"
    if library.exists():
        return library
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the ranks of a group start together
        if not library.exists():
            _build(compiler, sources[0], library)
    return library


def _build(compiler: str, source: Path, library: Path) -> None:
    logger.info("building the CPU kernel %s (once for this machine)", source.stem)
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        made = Path(scratch) / library.name
        command = [compiler, *_FLAGS, str(source), "-o", str(made)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BackendUnavailableError(
                f"the CPU kernel {source.stem!r} was not built: {error}"
            ) from error
        if done.returncode != 0:
            raise BackendUnavailableError(
                f"{Path(compiler).name} could not build the CPU kernel {source.stem!r}: "
                f"{done.stderr.strip()[:2000]}"
            )
        made.replace(library)  # atomic: others see a whole library or none


def _cache_folder() -> Path:
    folder = platformdirs.user_cache_path("palimpsest") / "native"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _cpu() -> str:
    """What `-march=native` depends on: a cache folder may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("flags", "Features", "model name", "cpu family", "model\t")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
