"""The actors as Ray runs them: a process each, with its logging and its place in the cluster."""

import ctypes
import os
import pkgutil
import platform
import sys

import ray

from cluster.logs import set_up_logging
from cluster.supervisor_view import Place
from configs import Device, ResolvedConfig
from scheduler.actor import SchedulerActor
from worker.actor import WorkerActor

# The step loop shares its process with an event loop. It wants the interpreter back sooner than
# after Python's 5 ms.
_SWITCH_INTERVAL_SECONDS = 0.0005


def place_here() -> Place:
    return Place(
        ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), os.getpid()
    )


def give_back_memory() -> None:
    """Let glibc return what it keeps, so that the size of an idle process says what it holds.

    Otherwise it grows for hours: each of Ray's twenty threads keeps the most it ever had.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


class SchedulerProcess(SchedulerActor):
    def __init__(self, config: ResolvedConfig) -> None:
        set_up_logging(config.server)
        sys.setswitchinterval(_SWITCH_INTERVAL_SECONDS)
        super().__init__(config, on_idle=give_back_memory)

    async def place(self) -> Place:
        return place_here()


class WorkerProcess(WorkerActor):
    def __init__(self, loader: str, config: ResolvedConfig, device: Device, rank: int) -> None:
        """`loader`: see `EngineSpec.loader`; what it imports is imported in this process only."""
        set_up_logging(config.server)
        super().__init__(pkgutil.resolve_name(loader), config, device, rank)

    def place(self) -> Place:
        return place_here()
