"""How much memory loading takes, in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

from worker.pull import pull

REPOSITORY = Path(__file__).parents[3]
SLACK_BYTES = 48 << 20
"""For the largest single matrix in both of its orders, and the allocator."""

PROGRAM = """
import resource, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from worker.models.base import Solo
from worker.models.registry import load_decoder
def peak_bytes():
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
class Rank(Solo):
    rank, size = int(sys.argv[3]), int(sys.argv[4])
before = peak_bytes()
decoder = load_decoder(Path(sys.argv[1]), dtype=sys.argv[2], comm=Rank())
print(peak_bytes() - before, decoder.spec.weight_bytes)
"""


def load(directory: Path, dtype: str, rank: int = 0, size: int = 1) -> tuple[int, int]:
    """The growth of the process at its peak, and the weights it holds."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(directory), dtype, str(rank), str(size)],
        env={"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    grown, held = map(int, done.stdout.split())
    return grown, held


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.full)])
def test_loading_peaks_at_the_weights_and_one_shard(dtype: str) -> None:
    directory = pull("smollm2-135m")
    shard = (directory / "model.safetensors").stat().st_size
    grown, held = load(directory, dtype)
    assert grown <= held + shard + SLACK_BYTES
    # Once, and once more the tied embedding, 49,152 x 576, which the head reads in packed order.
    embedding = 49152 * 576 * 2
    factor = 2 if dtype == "float32" else 1
    assert held <= factor * (shard + embedding) * 1.005


def test_a_rank_reads_its_slice_alone() -> None:
    directory = pull("smollm2-135m")
    shard = (directory / "model.safetensors").stat().st_size
    grown, held = load(directory, "bfloat16", rank=1, size=3)
    assert held < 0.45 * shard
    assert grown <= held + 0.7 * shard + SLACK_BYTES
