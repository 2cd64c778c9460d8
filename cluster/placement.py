"""Where the workers of a group run: one placement group, one bundle for each pipeline stage.

The tensor-parallel ranks of a stage exchange activations in every layer, so they share a bundle
and therefore a machine; stages talk once a step and may be spread.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.errors import EngineStartError, ResizeError
from configs import Device, ParallelConfig
from configs.ranks import place_of_rank

logger = logging.getLogger(__name__)

_PATIENCE_SECONDS = 10.0
_TICK_SECONDS = 1.0
# Ray knows no empty bundles. Small enough that a machine with one CPU holds thousands.
_ALMOST_NO_CPU = 0.001


@dataclass(frozen=True, slots=True)
class Placement:
    """A place for every rank of a group, now or as soon as some machine has room for it.

    When a machine dies, Ray looks for another place for what was there.
    """

    group: PlacementGroup
    parallel: ParallelConfig
    device: Device

    def options_of(self, rank: int) -> dict[str, Any]:
        """The Ray actor options that put `rank` where it belongs. It waits for its place."""
        is_gpu = self.device == "cuda"
        return {
            "num_cpus": 0 if is_gpu else self.parallel.cpus_per_rank,
            "num_gpus": 1 if is_gpu else 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self.group, place_of_rank(self.parallel, rank).pp_stage
            ),
        }

    async def _watch(self, report: Callable[[str], None]) -> None:
        """Tell `report` what the cluster lacks, once a second, while some stage has had no place
        for ten seconds; and an empty text when all have theirs again. Never returns."""
        clock = asyncio.get_running_loop().time
        since_seconds, is_told = clock(), False
        while True:
            num_placed = await asyncio.to_thread(self.num_placed)
            if num_placed == self.parallel.pipeline_parallel_size:
                since_seconds = clock()
                if is_told:
                    is_told = False
                    report("")
            elif clock() - since_seconds > _PATIENCE_SECONDS:
                is_told = True
                report(await asyncio.to_thread(self._lacking, num_placed))
            await asyncio.sleep(_TICK_SECONDS)

    @contextlib.asynccontextmanager
    async def time_limit(
        self, seconds: float, *, waits: bool, tell: Callable[[str], None]
    ) -> AsyncIterator[None]:
        """Raises TimeoutError if the body takes longer, and EngineStartError if that is because the
        cluster lacks something. `waits`: while it does, time does not count.

        `tell` is called with what it lacks, again and again, and when all have a place with that.
        It is logged once.
        """
        clock, lacks = asyncio.get_running_loop().time, ""

        def report(lacking: str) -> None:
            nonlocal lacks
            if lacking and not lacks:
                logger.warning("%s", lacking)
            lacks = lacking
            tell(lacking or "all workers have a place, and those that are new load the model")
            if waits:
                limit.reschedule(clock() + seconds)

        watching = asyncio.ensure_future(self._watch(report))
        try:
            async with asyncio.timeout(seconds) as limit:
                yield
        except TimeoutError as error:
            if not lacks:
                raise
            raise EngineStartError(
                f"{lacks}; gave up after server.group_start_seconds = {seconds:g}"
            ) from error
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    def num_placed(self) -> int:
        """Stages that have a place. Asks Ray."""
        nodes = placement_group_table(self.group)["bundles_to_node_id"].values()
        return sum(bool(node) for node in nodes)

    def remove(self) -> None:
        """Give the resources back. Ray kills what still runs in them."""
        remove_placement_group(self.group)

    def _lacking(self, num_placed: int) -> str:
        """One sentence on what was asked for, and what there is. Asks Ray."""
        kind, amount = _bundle_of_stage(self.parallel, self.device)
        total, free = ray.cluster_resources(), ray.available_resources()
        num_stages, stages = self.parallel.pipeline_parallel_size, ""
        if num_stages > 1:
            missing = f"{num_stages - num_placed} of " if num_placed else ""
            stages = f"{missing}{num_stages} machines or shares of one, each with "
        return (
            f"waiting for {stages}{amount:g} {kind}: the cluster has {total.get(kind, 0):g}, of "
            f"which {free.get(kind, 0):g} are free; stop what holds them, add machines, or lower "
            f"parallel.tensor_parallel_size or parallel.pipeline_parallel_size"
        )


def choose_device(parallel: ParallelConfig) -> Device:
    """The configured device, else GPUs if the cluster has any, else CPUs."""
    if parallel.device != "auto":
        return parallel.device
    return "cuda" if ray.cluster_resources().get("GPU", 0) >= 1 else "cpu"


def reserve(parallel: ParallelConfig, device: Device) -> Placement:
    """Ask Ray for a place for every rank. Returns at once, whether there is one or not."""
    kind, amount = _bundle_of_stage(parallel, device)
    bundles = [{kind: amount}] * parallel.pipeline_parallel_size
    return Placement(placement_group(bundles, strategy="PACK"), parallel, device)


def check_room(parallel: ParallelConfig, instead_of: Placement) -> None:
    """Raises ResizeError if the cluster has no room for `parallel` when `instead_of` is gone.

    What is free is known for the cluster as a whole alone, so not all that passes can be placed.
    Asks Ray.
    """
    kind, amount = _bundle_of_stage(parallel, instead_of.device)
    num_stages = parallel.pipeline_parallel_size
    machines = [node["Resources"].get(kind, 0) for node in ray.nodes() if node["Alive"]]
    num_shares = sum(int(total / amount) for total in machines)
    if num_shares < num_stages:
        shares = f"{num_stages} machines or shares of one, each with " if num_stages > 1 else ""
        raise ResizeError(
            f"it needs {shares}{amount:g} {kind}, and the machines of the cluster, with "
            f"{', '.join(f'{total:g}' for total in machines)}, have room for {num_shares} of that; "
            f"add machines, or choose a smaller shape"
        )
    _, held_amount = _bundle_of_stage(instead_of.parallel, instead_of.device)
    free = ray.available_resources().get(kind, 0) + instead_of.num_placed() * held_amount
    if free < num_stages * amount:
        raise ResizeError(
            f"it needs {num_stages * amount:g} {kind}, and {free:g} are free, those that the "
            f"engine holds included; stop what holds the others, or add machines"
        )


def _bundle_of_stage(parallel: ParallelConfig, device: Device) -> tuple[str, float]:
    """The kind of resource, and how much of it."""
    if device == "cuda":
        return "GPU", parallel.tensor_parallel_size
    num_cpus = parallel.cpus_per_rank * parallel.tensor_parallel_size
    return "CPU", num_cpus or _ALMOST_NO_CPU
