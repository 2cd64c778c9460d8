"""A rank as a member of the groups that the supervisor forms, one for each epoch."""

import logging
import os
import socket
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from configs import Device, ParallelConfig, ResolvedConfig
from configs.ranks import world_size
from scheduler.messages import JoinGroup, StepPlan, StepResult, WorkerHello
from worker.distributed import Meeting
from worker.errors import GroupBrokenError
from worker.models.shape import check_shape
from worker.pull import find_or_pull
from worker.rank import Rank

logger = logging.getLogger(__name__)


class Member:
    """Implements `worker.actor.LoadedRank`."""

    def __init__(self, rank: Rank, config: ResolvedConfig, directory: Path) -> None:
        """`rank` has its weights, from `directory`."""
        self._rank = rank
        self._config = config
        self._directory = directory
        self._store: dist.Store | None = None

    def join(self, message: JoinGroup, listener: socket.socket | None) -> WorkerHello:
        """Raises GroupBrokenError, CacheTooSmallError."""
        report = self._rank.join(message.epoch, self._meeting(message, listener))
        return WorkerHello(
            epoch=message.epoch,
            rank=report.rank,
            num_blocks=report.num_blocks,
            block_bytes=report.bytes_per_block,
            model_digest=report.model_digest,
            vocab_size=report.vocab_size,
            max_model_len=report.max_model_len,
        )

    def _meeting(self, message: JoinGroup, listener: socket.socket | None) -> Meeting | None:
        if world_size(self._config.parallel) == 1:
            return None
        # The scheduler has the shorter and better informed deadline; this one is the last resort.
        patience_seconds = self._config.server.group_start_seconds
        try:
            self._store = dist.TCPStore(
                message.store_host,
                message.store_port,
                is_master=listener is not None,
                timeout=timedelta(seconds=patience_seconds),
                wait_for_workers=False,
                # Told only a port, the store would listen on every interface of the machine.
                master_listen_fd=listener.detach() if listener is not None else None,
            )
        except RuntimeError as error:
            raise GroupBrokenError(f"the store of the group cannot be reached: {error}") from error
        store = dist.PrefixStore(message.store_prefix, self._store)
        return Meeting(store, message.host, patience_seconds)

    def check_shape(self, parallel: ParallelConfig) -> None:
        check_shape(self._directory, parallel)

    def execute(self, plan: StepPlan) -> StepResult | None:
        return self._rank.execute(plan)

    def abort(self) -> None:
        self._rank.abort()

    def leave(self) -> None:
        self._rank.leave()
        self._store = None


def load_rank(config: ResolvedConfig, device: Device, rank: int) -> Member:
    """Read the weights of `rank`; raises ModelError, DeviceError.

    Sets the number of threads of this process, and must be called on the one that executes.
    """
    num_threads = None
    if device == "cpu":
        num_threads = max(1, len(os.sched_getaffinity(0)) // world_size(config.parallel))
    loaded = Rank(config, rank, device=device, num_threads=num_threads)
    directory = find_or_pull(config.model)
    loaded.load(directory)
    return Member(loaded, config, directory)
