"""How the ranks of a group speak to each other; what the executor and the models see of it.

A group is a grid: rank = stage * tensor_parallel_size + tensor rank (`configs.ranks`).

    tensor parallel   all ranks of a stage compute the same step together: `TensorGroup`
    pipeline          tensor rank i of a stage sends activations to tensor rank i of the next
"""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from worker.models.base import Communicator, Solo
from worker.sequence_table import Int64s


class TensorGroup(Communicator, Protocol):
    """All ranks of one stage. Every call is made by all of them, in the same order.

    Calls raise GroupBrokenError when a rank is gone, the group was aborted, or the deadline
    has passed; the group is of no use afterwards.
    """

    def broadcast(self, x: Tensor) -> None:
        """Overwrite `x` with that of rank 0."""
        ...

    def abort(self) -> None:
        """Make this rank's pending and later calls raise; from any thread, never blocks."""
        ...

    def close(self) -> None:
        """Free what the group holds; it must not be used afterwards."""
        ...


class StageLink(Protocol):
    """The neighbours of a rank in the stages before and after its own."""

    def send(self, hidden_tE: Tensor) -> None:
        """To the next stage. Returns before it has arrived; nobody may change `hidden_tE`."""
        ...

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """What the stage before sent next. Raises GroupBrokenError."""
        ...

    def close(self) -> None: ...


class SoloTensorGroup(Solo):
    """A stage of one rank."""

    def broadcast(self, x: Tensor) -> None:
        pass

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass


class Group:
    """A rank's place in its group, and its ways to the others."""

    def __init__(
        self,
        *,
        stage: int = 0,
        num_stages: int = 1,
        tensor: TensorGroup | None = None,
        link: StageLink | None = None,
    ) -> None:
        """Without arguments: a group of one. `link` is needed with more than one stage."""
        self.stage = stage
        self.num_stages = num_stages
        self.tensor = tensor or SoloTensorGroup()
        self._link = link

    @property
    def is_first_stage(self) -> bool:
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.num_stages - 1

    @property
    def answers(self) -> bool:
        """Whether this rank samples and reports results: one does per group."""
        return self.is_last_stage and self.tensor.rank == 0

    def send(self, hidden_tE: Tensor) -> None:
        assert self._link is not None, "a group with several stages has a link"
        self._link.send(hidden_tE)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        assert self._link is not None, "a group with several stages has a link"
        return self._link.receive(shape, dtype, device)

    def broadcast_ids(self, token_id_k: Int64s) -> Int64s:
        """The ids of tensor rank 0, on every rank of the stage; the others give any of the
        same length."""
        if self.tensor.size == 1:
            return token_id_k
        shared = torch.from_numpy(np.ascontiguousarray(token_id_k))
        self.tensor.broadcast(shared)
        return shared.numpy()

    def abort(self) -> None:
        """Make calls that wait for other ranks raise GroupBrokenError; from any thread."""
        self.tensor.abort()

    def close(self) -> None:
        self.tensor.close()
        if self._link is not None:
            self._link.close()
