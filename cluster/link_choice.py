"""Both ends of the link that a configuration asks for."""

from collections.abc import Callable
from dataclasses import dataclass

from cluster.links import LinkKeys, ZmqPlanLinkOffer, ZmqWorkerLinkOffer
from cluster.ray_link import RayPlanLinkOffer, RayWorkerLinkOffer, start_mailbox
from configs import ParallelConfig
from scheduler.ports import PlanLinkOffer
from worker.ports import WorkerLinkOffer


@dataclass(frozen=True, slots=True)
class LinkOffers:
    """One epoch's link, to be opened by those who use it."""

    of_scheduler: PlanLinkOffer
    of_worker: Callable[[int, str], WorkerLinkOffer]
    """Takes the rank, and the address of the scheduler's end."""


def offer_link(parallel: ParallelConfig, num_ranks: int, host: str | None) -> LinkOffers:
    """`host` is where the scheduler listens; None: all ranks are on its machine."""
    if parallel.plan_link == "ray":
        mailbox = start_mailbox()  # lives as long as one of the offers, or of the links
        return LinkOffers(
            RayPlanLinkOffer(mailbox, num_ranks),
            lambda rank, address: RayWorkerLinkOffer(mailbox, rank),
        )
    keys = LinkKeys.generate()
    return LinkOffers(
        ZmqPlanLinkOffer(keys, num_ranks, host, (parallel.first_port, parallel.last_port)),
        lambda rank, address: ZmqWorkerLinkOffer(keys, rank, address),
    )
