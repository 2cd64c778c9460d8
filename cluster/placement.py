"""Where the workers of a group run: one placement group, one bundle for each pipeline stage.

The tensor-parallel ranks of a stage exchange activations in every layer, so they share a bundle
and therefore a machine; stages talk once a step and may be spread.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.errors import EngineStartError
from configs import Device, ParallelConfig
from configs.ranks import place_of_rank

logger = logging.getLogger(__name__)

_PATIENCE_SECONDS = 10.0
# Ray knows no empty bundles. Small enough that a machine with one CPU holds thousands.
_ALMOST_NO_CPU = 0.001


@dataclass(frozen=True, slots=True)
class Placement:
    """A reserved place for every rank of a group."""

    group: PlacementGroup
    parallel: ParallelConfig
    device: Device

    def options_of(self, rank: int) -> dict[str, Any]:
        """The Ray actor options that put `rank` where it belongs."""
        is_gpu = self.device == "cuda"
        return {
            "num_cpus": 0 if is_gpu else self.parallel.cpus_per_rank,
            "num_gpus": 1 if is_gpu else 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self.group, place_of_rank(self.parallel, rank).pp_stage
            ),
        }

    def remove(self) -> None:
        """Give the resources back. Ray kills what still runs in them."""
        remove_placement_group(self.group)


def choose_device(parallel: ParallelConfig) -> Device:
    """The configured device, else GPUs if the cluster has any, else CPUs."""
    if parallel.device != "auto":
        return parallel.device
    return "cuda" if ray.cluster_resources().get("GPU", 0) >= 1 else "cpu"


def bundle_of_stage(parallel: ParallelConfig, device: Device) -> dict[str, float]:
    if device == "cuda":
        return {"GPU": parallel.tensor_parallel_size}
    num_cpus = parallel.cpus_per_rank * parallel.tensor_parallel_size
    return {"CPU": num_cpus or _ALMOST_NO_CPU}


async def reserve(
    parallel: ParallelConfig,
    device: Device,
    *,
    timeout_seconds: float,
    report: Callable[[str], None],
) -> Placement:
    """Reserve a place for every rank, waiting for resources that others hold.

    `report` is told what is lacking after ten seconds. Raises EngineStartError after
    `timeout_seconds`.
    """
    bundle = bundle_of_stage(parallel, device)
    num_stages = parallel.pipeline_parallel_size
    group = placement_group([bundle] * num_stages, strategy="PACK")
    try:
        if not await asyncio.to_thread(group.wait, min(_PATIENCE_SECONDS, timeout_seconds)):
            lacking = _lacking(bundle, num_stages)
            report(lacking)
            remaining_seconds = max(0.0, timeout_seconds - _PATIENCE_SECONDS)
            if not await asyncio.to_thread(group.wait, remaining_seconds):
                raise EngineStartError(
                    f"{lacking}; gave up after server.group_start_seconds = {timeout_seconds:g}"
                )
    except BaseException:
        remove_placement_group(group)
        raise
    return Placement(group, parallel, device)


def _lacking(bundle: Mapping[str, float], num_stages: int) -> str:
    """One sentence on what was asked for, and what there is."""
    total, free = ray.cluster_resources(), ray.available_resources()
    ((kind, amount),) = bundle.items()
    stages = f"{num_stages} machines or shares of one, each with " if num_stages > 1 else ""
    return (
        f"waiting for {stages}{amount:g} {kind}: the cluster has {total.get(kind, 0):g}, of which "
        f"{free.get(kind, 0):g} are free; stop what holds them, add machines, or lower "
        f"parallel.tensor_parallel_size or parallel.pipeline_parallel_size"
    )
