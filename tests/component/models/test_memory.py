"""How much memory loading takes, in a process of its own."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from worker.pull import pull

REPOSITORY = Path(__file__).parents[3]
SLACK_BYTES = 32 << 20
"""For what is imported on the way, the buffer of one matrix, and the allocator."""

PROGRAM = """
import resource, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from worker.models.base import Solo
from worker.models.registry import load_decoder
def peak_bytes():
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
def anonymous_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
before, anonymous = peak_bytes(), anonymous_bytes()
comm = Solo(rank=int(sys.argv[3]), size=int(sys.argv[4]))
decoder = load_decoder(Path(sys.argv[1]), dtype=sys.argv[2], comm=comm)
print(peak_bytes() - before, anonymous_bytes() - anonymous, decoder.spec.weight_bytes)
"""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Bytes."""

    peak: int
    """The growth of the process at its peak, with the pages of the file that it maps."""
    kept: int
    """The growth of its own memory afterwards."""
    weights: int


def load(directory: Path, dtype: str, rank: int = 0, size: int = 1) -> Loaded:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(directory), dtype, str(rank), str(size)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return Loaded(*map(int, done.stdout.split()))


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.full)])
def test_loading_peaks_at_the_weights_and_one_shard(dtype: str) -> None:
    directory = pull("smollm2-135m")
    shard = (directory / "model.safetensors").stat().st_size
    loaded = load(directory, dtype)
    assert loaded.peak <= loaded.weights + shard + SLACK_BYTES
    assert loaded.kept <= loaded.weights + SLACK_BYTES
    # Once, and once more the tied embedding, 49,152 x 576, which the head reads in packed order.
    embedding = 49152 * 576 * 2
    factor = 2 if dtype == "float32" else 1
    assert loaded.weights == pytest.approx(factor * (shard + embedding), rel=0.005)


def test_a_rank_reads_its_slice_alone() -> None:
    directory = pull("smollm2-135m")
    shard = (directory / "model.safetensors").stat().st_size
    loaded = load(directory, "bfloat16", rank=1, size=3)
    assert loaded.weights < 0.45 * shard
    assert loaded.peak <= loaded.weights + 0.7 * shard + SLACK_BYTES
    assert loaded.kept <= loaded.weights + SLACK_BYTES
