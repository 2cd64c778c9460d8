"""How the processes of an engine find each other under a new epoch."""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass

from cluster.errors import EngineStartError
from cluster.group_size import group_size
from cluster.link_choice import offer_link
from cluster.ray_errors import first_done
from cluster.scheduler_handle import SchedulerHandle
from cluster.supervisor_view import Place
from cluster.worker_group import WorkerGroup
from configs import Device, ResolvedConfig
from scheduler.group import GroupSize


@dataclass(frozen=True, slots=True)
class Places:
    """Where the processes of a group run."""

    scheduler: Place
    ranks: tuple[Place, ...]

    @property
    def is_local(self) -> bool:
        """All on one machine."""
        return {place.node_id for place in self.ranks} == {self.scheduler.node_id}


async def places_of(scheduler: SchedulerHandle, workers: WorkerGroup) -> Places:
    place, places = await asyncio.gather(scheduler.actor.place.remote(), workers.places())
    return Places(place, tuple(places))


async def join(
    scheduler: SchedulerHandle,
    workers: WorkerGroup,
    places: Places,
    *,
    epoch: int,
    replicas: Collection[str],
    config: ResolvedConfig,
    device: Device,
) -> None:
    """Let everybody who is there meet, and the scheduler plan.

    `replicas`: ids of the ingress replicas there are. Raises EngineStartError if the ranks do not
    go together, or one fails before all are there.
    """
    host = None if places.is_local else places.scheduler.host
    link = offer_link(config.parallel, workers.num_ranks, host)
    address = await scheduler.actor.open_link.remote(link.of_scheduler)
    hellos = await workers.join(epoch, places.ranks, is_local=places.is_local)
    size = group_size(hellos, config, device)
    workers.run(link, address)
    await _begin(scheduler, workers, epoch, size, replicas)


async def _begin(
    scheduler: SchedulerHandle,
    workers: WorkerGroup,
    epoch: int,
    size: GroupSize,
    replicas: Collection[str],
) -> None:
    begun = asyncio.ensure_future(scheduler.begin(epoch, size, replicas))
    # A rank that fails before it has joined would be waited for in vain.
    ended = asyncio.ensure_future(workers.first_end())
    if begun not in await first_done(begun, ended):
        raise EngineStartError(ended.result())
    begun.result()
