"""Groups over torch.distributed: gloo between CPU ranks, nccl between GPUs.

Process groups are made from a store directly, without torch's global default group, so that a
process can leave one epoch's group and join the next, and a test can hold several.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from configs.ranks import RankPlace, rank_at
from configs.sections import ParallelConfig
from worker.comm import Group, TensorGroup
from worker.errors import DeviceError, GroupBrokenError
from worker.shared_memory import try_shared_memory

_MAX_SENDS = 16
"""Activations on their way; the scheduler's window of plans is smaller."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where and how the ranks of one epoch find each other."""

    store: dist.Store
    """Its keys belong to this epoch alone: wrap a longer-lived one into a PrefixStore."""
    host: str = "127.0.0.1"
    """The address on which this rank listens for the others."""
    deadline_seconds: float = 300.0
    """How long a call may wait for another rank."""
    shared_memory: bool = True
    """Whether CPU ranks of one stage may use it where they can."""


class GroupJoin:
    """Makes the process groups of one rank."""

    def __init__(self, meeting: Meeting, parallel: ParallelConfig, place: RankPlace) -> None:
        self._meeting = meeting
        self._parallel = parallel
        self._place = place

    def join(self, device: torch.device) -> tuple[Group, "ControlGroup"]:
        """Meet the other ranks. Blocks until all are there or the deadline has passed.

        Raises GroupBrokenError.
        """
        tp_size = self._parallel.tensor_parallel_size
        num_stages = self._parallel.pipeline_parallel_size
        stage, tp_rank = self._place.pp_stage, self._place.tp_rank
        rank = rank_at(self._parallel, self._place)
        with _told_as_broken("the group could not be formed"):
            control = ControlGroup(self._gloo("all", rank, tp_size * num_stages))
            tensor = self._tensor_group(device, stage, tp_rank, tp_size, control)
            link = None
            if num_stages > 1:
                make = self._nccl if device.type == "cuda" else self._gloo
                # A group per tensor rank: its own connections, and ranks that are stage numbers.
                link = TorchStageLink(make(f"stages{tp_rank}", stage, num_stages), stage)
        return Group(stage=stage, num_stages=num_stages, tensor=tensor, link=link), control

    def _tensor_group(
        self, device: torch.device, stage: int, rank: int, size: int, control: "ControlGroup"
    ) -> TensorGroup | None:
        if size == 1:
            return None
        if device.type == "cuda":
            return TorchTensorGroup(self._nccl(f"tensor{stage}", rank, size), rank, size)
        gloo = TorchTensorGroup(self._gloo(f"tensor{stage}", rank, size), rank, size)
        if not self._meeting.shared_memory:
            return gloo

        def agree(able: bool) -> bool:
            return bool(gloo.all_reduce(torch.tensor([float(able)])).item() == size)

        shared = try_shared_memory(
            dist.PrefixStore(f"shared{stage}", self._meeting.store),
            rank,
            size,
            agree=agree,
            deadline_seconds=self._meeting.deadline_seconds,
        )
        return shared or gloo

    def _gloo(self, name: str, rank: int, size: int) -> Any:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._meeting.host)]
        options._timeout = timedelta(seconds=self._meeting.deadline_seconds)
        store = dist.PrefixStore(name, self._meeting.store)
        return dist.ProcessGroupGloo(store, rank, size, options)

    def _nccl(self, name: str, rank: int, size: int) -> Any:
        if not dist.is_nccl_available():
            raise DeviceError("this build of torch has no nccl; ranks on GPUs need it")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=self._meeting.deadline_seconds)
        store = dist.PrefixStore(name, self._meeting.store)
        return dist.ProcessGroupNCCL(store, rank, size, options)


class ControlGroup:
    """All ranks of a group, for the few things they settle before the first step."""

    def __init__(self, group: Any | None) -> None:
        """None: a group of one."""
        self._group = group

    def minimum(self, value: int) -> int:
        """The smallest `value` of all ranks."""
        if self._group is None:
            return value
        shared = torch.tensor([value])
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        _run(self._group.allreduce, [shared], options)
        return int(shared.item())


class TorchTensorGroup:
    """Implements `worker.comm.TensorGroup` over a process group of torch."""

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self._group = group
        self.rank = rank
        self.size = size

    def all_reduce(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu":
            x = x.contiguous()
            _run(self._group.allreduce, [x])
            return x
        total = x.float().contiguous()  # gloo would round half-precision sums after every rank
        _run(self._group.allreduce, [total])
        return total.to(x.dtype)

    def all_gather_last_dim(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        _run(self._group.allgather, [parts], [x])
        return torch.cat(parts, dim=-1)

    def broadcast(self, x: Tensor) -> None:
        if x.device.type == "cpu" and self._group.name() == "nccl":
            on_device = x.cuda()
            _run(self._group.broadcast, [on_device], _from_rank_0())
            x.copy_(on_device)
            return
        _run(self._group.broadcast, [x], _from_rank_0())

    def abort(self) -> None:
        """Ends what nccl waits for. gloo cannot be interrupted: there a call ends when a peer's
        process does, when a peer closes the group, or at the deadline."""
        group = self._group
        if group is not None:
            with suppress(RuntimeError):
                group.abort()

    def close(self) -> None:
        """Closes the connections, which ends the calls of peers that wait for this rank."""
        self.abort()
        self._group = None


class TorchStageLink:
    """Implements `worker.comm.StageLink`: ranks of `group` are stage numbers."""

    def __init__(self, group: Any, stage: int) -> None:
        self._group = group
        self._stage = stage
        self._sending: deque[tuple[Any, Tensor]] = deque()

    def send(self, hidden_tE: Tensor) -> None:
        hidden_tE = hidden_tE.contiguous()
        if len(self._sending) == _MAX_SENDS:
            _wait(self._sending.popleft()[0])
        with _told_as_broken("activations could not be sent"):
            sent = self._group.send([hidden_tE], self._stage + 1, 0)
        self._sending.append((sent, hidden_tE))  # keeps the tensor until it is gone

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        hidden_tE = torch.empty(shape, dtype=dtype, device=device)
        with _told_as_broken("no activations came"):
            received = self._group.recv([hidden_tE], self._stage - 1, 0)
        _wait(received)
        return hidden_tE

    def close(self) -> None:
        self._sending.clear()
        self._group = None


def _from_rank_0() -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    return options


def _run(collective: Callable[..., Any], *arguments: Any) -> None:
    """To its end; already the call fails where nccl cannot connect."""
    with _told_as_broken("a rank is gone or did not answer in time"):
        collective(*arguments).wait()


def _wait(work: Any) -> None:
    _run(lambda: work)


@contextmanager
def _told_as_broken(what: str) -> Iterator[None]:
    """Turns what torch.distributed raises (RuntimeError and its kin) into GroupBrokenError."""
    try:
        yield
    except RuntimeError as error:
        raise GroupBrokenError(f"{what}: {error}") from error
