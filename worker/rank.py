"""A rank from start to step: device, weights, cache, and one executor per epoch.

    load     weights, once; needs no other rank
    join     meet the others of an epoch, agree on the number of blocks, warm up, start empty
    execute  plans, until the epoch ends

Weights and cache memory outlive an epoch: a rank that survives the death of another joins the
next epoch without loading anything.
"""

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from configs import ResolvedConfig
from configs.ranks import RankPlace, place_of_rank, world_size
from scheduler.messages import StepPlan, StepResult
from worker.attention.select import select_attention
from worker.comm import Group
from worker.device import MemoryGrant, grant_on_cpu, grant_on_gpu, open_device, use_threads
from worker.distributed import ControlGroup, GroupJoin, Meeting
from worker.errors import DeviceError, WorkerError
from worker.executor import Executor, Shard
from worker.kv_cache import CacheSize, KVCache, block_bytes, cache_dtype
from worker.models.base import Communicator, Decoder, Solo
from worker.models.registry import load_decoder
from worker.warm_up import warm_up_plans

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RankReport:
    """What a rank tells when it has joined an epoch."""

    rank: int
    num_blocks: int
    """Of the group: the same on all ranks."""
    bytes_per_block: int
    """On this rank."""
    max_model_len: int
    vocab_size: int
    model_digest: str


class TensorSeat:
    """The tensor-parallel group of the current epoch, as one object that outlives epochs.

    A decoder is built once and keeps its communicator; this one can be given another group.
    Between epochs it is apart from its peers, and nothing that a decoder does waits for them.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._apart = Solo(rank, size)
        self.group: Communicator = self._apart

    def leave(self) -> None:
        self.group = self._apart

    def all_reduce(self, x: Tensor) -> Tensor:
        return self.group.all_reduce(x)

    def all_gather_last_dim(self, x: Tensor) -> Tensor:
        return self.group.all_gather_last_dim(x)


class Rank:
    """One worker. Not thread-safe, but `abort` may come from any thread."""

    def __init__(
        self,
        config: ResolvedConfig,
        rank: int,
        *,
        device: str = "cpu",
        device_index: int = 0,
        num_threads: int | None = None,
    ) -> None:
        """`num_threads`: of this process's matrix kernels; None leaves torch's choice."""
        self._config = config
        self._rank = rank
        self._place: RankPlace = place_of_rank(config.parallel, rank)
        self._device = open_device(device, device_index)
        if num_threads is not None:
            use_threads(num_threads)
        self._seat = TensorSeat(self._place.tp_rank, config.parallel.tensor_parallel_size)
        self._decoder: Decoder | None = None
        self._shard: Shard | None = None
        self._group: Group | None = None
        self._executor: Executor | None = None

    def load(self, directory: Path) -> None:
        """Read this rank's part of the weights. Raises ModelError."""
        self._decoder = load_decoder(
            directory,
            dtype=self._config.model.dtype,
            device=self._device,
            comm=self._seat,
            stage=self._place.pp_stage,
            num_stages=self._config.parallel.pipeline_parallel_size,
        )

    def join(self, epoch: int, meeting: Meeting | None) -> RankReport:
        """Leave the last epoch's group, form this one's and start with an empty table.

        `meeting` may be None for a group of one rank. Blocks until all ranks have come. Raises
        GroupBrokenError, CacheTooSmallError.
        """
        self.leave()
        decoder = self._loaded()
        if meeting is None and world_size(self._config.parallel) > 1:
            raise WorkerError(f"rank {self._rank} of several has to meet the others")
        group, control = Group(), ControlGroup(None)
        if meeting is not None:
            joining = GroupJoin(meeting, self._config.parallel, self._place)
            group, control = joining.join(self._device)
        self._group = group
        # nccl connects at its first call, and what it then holds is not there for the cache.
        group.tensor.all_reduce(torch.zeros(1, device=self._device))
        spec, cache = decoder.spec, self._config.cache
        dtype = cache_dtype(cache.kv_cache_dtype, spec.dtype)
        bytes_per_block = block_bytes(spec, cache.block_size, dtype)
        max_model_len = self._config.model.max_model_len or spec.max_position
        if self._shard is None:
            # Only newcomers profile: the seat is still apart, for the others would not answer.
            size, source = self._cache_size(bytes_per_block)
            size = CacheSize(control.minimum(size.num_blocks), cache.block_size)
            # An explicit number is a choice: longer requests will end where the pool ends.
            if cache.num_blocks is None:
                size.require(max_model_len, granted=source)
            size.log(max_model_len, bytes_per_block)
            kv_cache = KVCache(
                spec,
                size=size,
                dtype=dtype,
                device=self._device,
                k_scale=cache.k_scale,
                v_scale=cache.v_scale,
            )
            attention = select_attention(self._device, spec.dtype, dtype)
            self._shard = Shard(decoder, kv_cache, attention, self._device)
            num_blocks = size.num_blocks
        else:
            # What a newcomer can hold may be less; this rank's memory stays as it is.
            num_blocks = control.minimum(self._shard.cache.size.num_blocks)
        self._seat.group = group.tensor
        new_executor = partial(Executor, self._shard, group, epoch=epoch, num_blocks=num_blocks)
        if self._compiles:
            warming_up, size = new_executor(), CacheSize(num_blocks, cache.block_size)
            for plan in warm_up_plans(epoch, size, num_stages=group.num_stages):
                warming_up.execute(plan)
        self._executor = new_executor()
        return RankReport(
            rank=self._rank,
            num_blocks=num_blocks,
            bytes_per_block=bytes_per_block,
            max_model_len=max_model_len,
            vocab_size=spec.vocab_size,
            model_digest=spec.digest,
        )

    def execute(self, plan: StepPlan) -> StepResult | None:
        """See `Executor.execute`."""
        if self._executor is None:
            raise WorkerError(f"rank {self._rank} was sent a plan before it joined an epoch")
        return self._executor.execute(plan)

    @property
    def num_open(self) -> int:
        """Sequences that are open now."""
        return 0 if self._executor is None else self._executor.num_open

    def abort(self) -> None:
        """Make a call that waits for other ranks raise GroupBrokenError."""
        group = self._group  # which may be given up at this moment
        if group is not None:
            group.abort()

    def leave(self) -> None:
        """Give up the current group, if any. Weights and cache stay."""
        self._executor = None
        self._seat.leave()
        if self._group is not None:
            self._group.close()
            self._group = None

    @property
    def _compiles(self) -> bool:
        """Kernels are compiled when they are first called, which takes seconds. Those for CPUs are
        built before."""
        return self._device.type == "cuda"

    def _loaded(self) -> Decoder:
        if self._decoder is None:
            raise WorkerError(f"rank {self._rank} was told to join before its weights were loaded")
        return self._decoder

    def _cache_size(self, bytes_per_block: int) -> tuple[CacheSize, str]:
        """What fits on this rank, and in words where the number comes from."""
        cache = self._config.cache
        if cache.num_blocks is not None:
            return CacheSize(cache.num_blocks, cache.block_size), "cache.num_blocks"
        grant = self._grant()
        return CacheSize(grant.cache_bytes // bytes_per_block, cache.block_size), grant.source

    def _grant(self) -> MemoryGrant:
        cache = self._config.cache
        if self._device.type == "cpu":
            if cache.kv_cache_memory is None:
                raise DeviceError("cache.kv_cache_memory must be set on CPU")
            return grant_on_cpu(int(cache.kv_cache_memory))
        if cache.kv_cache_memory is not None:
            return MemoryGrant(int(cache.kv_cache_memory), "cache.kv_cache_memory")
        return grant_on_gpu(self._device, cache.gpu_memory_utilization, self._profile())

    def _profile(self) -> int:
        """The most bytes that torch holds in the largest step there can be, weights included."""
        torch.cuda.reset_peak_memory_stats(self._device)
        self._largest_step()
        return int(torch.cuda.max_memory_allocated(self._device))

    def _largest_step(self) -> None:
        """Go through the largest step there can be, without peers, neighbours and attention."""
        decoder, scheduler = self._loaded(), self._config.scheduler
        spec = decoder.spec
        num_tokens = min(scheduler.max_num_batched_tokens, spec.max_position)
        position_ids_t = torch.arange(num_tokens, device=self._device)
        with torch.inference_mode():
            if spec.is_first_stage:
                hidden_tE = decoder.embed(torch.zeros_like(position_ids_t))
            else:
                shape = (num_tokens, spec.hidden_size)
                hidden_tE = torch.zeros(shape, dtype=spec.dtype, device=self._device)
            hidden_tE = decoder.layers(hidden_tE, position_ids_t, _no_attention)
            if spec.is_last_stage:
                logits_sV = decoder.logits(hidden_tE[: scheduler.max_num_seqs])
                logits_sV.exp().cumsum(dim=-1, dtype=torch.float64)  # as the sampler does


def _no_attention(
    layer: int,
    q_tHD: Tensor,
    k_tGD: Tensor,
    v_tGD: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    return torch.zeros_like(q_tHD, memory_format=torch.contiguous_format)
