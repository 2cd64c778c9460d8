"""The device of a rank: which one, how many threads, how much memory for the KV cache."""

from dataclasses import dataclass
from pathlib import Path

import torch

from worker.errors import CacheTooSmallError, DeviceError


def open_device(name: str, index: int = 0) -> torch.device:
    """`cpu`, or GPU number `index` for `cuda`; raises DeviceError when it is not there."""
    if name == "cpu":
        return torch.device("cpu")
    if name != "cuda":
        raise DeviceError(f"device {name!r} is not known; use cpu or cuda")
    if not torch.cuda.is_available():
        raise DeviceError("device cuda was asked for, but torch sees no GPU; use cpu")
    if index >= torch.cuda.device_count():
        raise DeviceError(f"GPU {index} was asked for, but there are {torch.cuda.device_count()}")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def use_threads(num_threads: int) -> None:
    """Set the threads of this process's matrix kernels. Several ranks on one machine must share
    its cores on purpose: with more threads than cores, steps go from 40 ms to seconds."""
    torch.set_num_threads(num_threads)


@dataclass(frozen=True, slots=True)
class MemoryGrant:
    """Bytes for one rank's KV cache, and in words where they come from."""

    cache_bytes: int
    source: str


def grant_on_cpu(kv_cache_memory_bytes: int) -> MemoryGrant:
    """Raises CacheTooSmallError when this machine does not have that much left."""
    available = available_bytes()
    if available is not None and kv_cache_memory_bytes > available:
        raise CacheTooSmallError(
            f"cache.kv_cache_memory asks for {_gib(kv_cache_memory_bytes)} on this rank, but "
            f"{_gib(available)} are free: lower it"
        )
    return MemoryGrant(
        kv_cache_memory_bytes, f"cache.kv_cache_memory of {_gib(kv_cache_memory_bytes)}"
    )


def grant_on_gpu(device: torch.device, utilization: float, peak_bytes: int) -> MemoryGrant:
    """What `utilization` of the GPU's memory leaves beside weights and activations.

    `peak_bytes` is the most that torch held during a profiling run, weights included.
    """
    free, total = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device)
    others = max(0, total - free - held)  # contexts, nccl, other processes
    cache_bytes = int(total * utilization) - peak_bytes - others
    return MemoryGrant(
        max(0, cache_bytes),
        f"cache.gpu_memory_utilization {utilization} of {_gib(total)}, less {_gib(peak_bytes)} for "
        f"weights and activations and {_gib(others)} held by others,",
    )


def available_bytes() -> int | None:
    """Memory this process may still take: the machine's, or what its cgroup leaves.

    None where the system does not tell.
    """
    found = [size for size in (_of_machine(), _of_cgroup()) if size is not None]
    return min(found, default=None)


def _of_machine() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    sizes = dict(line.split(":", 1) for line in lines)
    found = sizes.get("MemAvailable")
    return int(found.split()[0]) * 1024 if found else None


def _of_cgroup() -> int | None:
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        stat = Path("/sys/fs/cgroup/memory.stat").read_text().splitlines()
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    reclaimable = int(dict(line.split() for line in stat).get("inactive_file", 0))
    return max(0, int(limit) - used + reclaimable)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
