"""Tensor-parallel collectives, through shared memory and through gloo: same rules for both."""

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from configs.ranks import RankPlace
from configs.sections import ParallelConfig
from worker.comm import Group
from worker.distributed import GroupJoin, Meeting, TorchTensorGroup
from worker.errors import GroupBrokenError
from worker.shared_memory import SharedMemoryTensorGroup

T = TypeVar("T")
CPU = torch.device("cpu")


def join_all(
    tp: int, pp: int = 1, *, shared_memory: bool = True, deadline_seconds: float = 20.0
) -> list[Group]:
    """A whole group, its ranks in this process."""
    store = dist.HashStore()
    parallel = ParallelConfig(tensor_parallel_size=tp, pipeline_parallel_size=pp)
    meeting = Meeting(store, deadline_seconds=deadline_seconds, shared_memory=shared_memory)

    def join(place: RankPlace) -> Group:
        group, control = GroupJoin(meeting, parallel, place).join(CPU)
        assert control.minimum(100 + place.tp_rank + place.pp_stage) == 100
        return group

    places = [RankPlace(stage, rank) for stage in range(pp) for rank in range(tp)]
    with ThreadPoolExecutor(len(places)) as threads:
        return list(threads.map(join, places))


def on_all(groups: list[Group], call: Callable[[Group], T]) -> list[T]:
    with ThreadPoolExecutor(len(groups)) as threads:
        return list(threads.map(call, groups))


def reduce_part(parts: Sequence[Tensor], group: Group) -> Tensor:
    return group.tensor.all_reduce(parts[group.tensor.rank])


def gather_part(parts: Sequence[Tensor], group: Group) -> Tensor:
    return group.tensor.all_gather_last_dim(parts[group.tensor.rank])


def broadcast_ids(ids: Tensor, group: Group) -> Tensor:
    mine = ids if group.tensor.rank == 0 else torch.zeros_like(ids)
    return torch.from_numpy(group.broadcast_ids(mine.numpy()))


@pytest.fixture(params=[(2, True), (3, True), (4, True), (2, False), (3, False)], ids=str)
def groups(request: pytest.FixtureRequest) -> Any:
    size, shared_memory = request.param
    made = join_all(size, shared_memory=shared_memory)
    expected = SharedMemoryTensorGroup if shared_memory else TorchTensorGroup
    assert {type(group.tensor) for group in made} == {expected}
    yield made
    on_all(made, Group.close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_all_reduce_is_exact_and_the_same_everywhere(
    groups: list[Group], dtype: torch.dtype
) -> None:
    """Small sums are whole on every rank, large ones shared, huge ones in several parts."""
    rng = torch.Generator().manual_seed(0)
    for shape in ((1, 1), (1, 576), (7, 33), (32, 576), (513, 576), (4000, 300)):
        parts = [torch.randn(shape, generator=rng).to(dtype) for _ in groups]
        sums = on_all(groups, partial(reduce_part, [part.clone() for part in parts]))
        total = torch.stack(parts).double().sum(0)
        for found in sums:
            assert found.dtype == dtype
            assert torch.equal(found, sums[0])
        tolerance = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
        assert ((sums[0].double() - total).abs() <= tolerance * total.abs().clamp(min=1)).all()


def test_all_gather_puts_ranks_side_by_side(groups: list[Group]) -> None:
    for rows, width in ((1, 5), (32, 1234), (3, 700_000)):
        whole = torch.arange(rows * width * len(groups), dtype=torch.float32).view(rows, -1)
        parts = whole.chunk(len(groups), dim=1)
        for found in on_all(groups, partial(gather_part, parts)):
            assert torch.equal(found, whole)


def test_broadcast_gives_everybody_what_rank_0_has(groups: list[Group]) -> None:
    for length in (1, 64, 1_000_000):
        expected = torch.arange(length)
        found = on_all(groups, partial(broadcast_ids, expected))
        assert all(torch.equal(ids, expected) for ids in found)


def test_calls_of_every_kind_follow_each_other_fast(groups: list[Group]) -> None:
    """A slow rank must never see its slot written over by a fast one."""

    def run(group: Group) -> None:
        rank = group.tensor.rank
        for step in range(150):
            if step % 7 == rank:
                time.sleep(0.001)
            total = group.tensor.all_reduce(torch.full((3,), float(step * (rank + 1))))
            ids = torch.tensor([step if rank == 0 else -1])
            group.tensor.broadcast(ids)
            group.tensor.broadcast(ids.add_(1) if rank == 0 else ids)
            group.tensor.broadcast(ids.add_(1) if rank == 0 else ids)
            gathered = group.tensor.all_gather_last_dim(torch.tensor([[rank, step]]))
            assert total.tolist() == [step * sum(range(1, len(groups) + 1))] * 3
            assert ids.item() == step + 2
            assert gathered.view(-1, 2)[:, 0].tolist() == list(range(len(groups)))

    on_all(groups, run)


def test_abort_wakes_who_waits() -> None:
    waiting, other = join_all(2)
    with ThreadPoolExecutor(1) as thread:
        call = thread.submit(waiting.tensor.all_reduce, torch.ones(4))
        time.sleep(0.05)
        assert not call.done()
        threading.Thread(target=other.abort).start()
        with pytest.raises(GroupBrokenError, match="told to stop"):
            call.result(timeout=2)
    with pytest.raises(GroupBrokenError, match="told to stop"):
        other.tensor.all_reduce(torch.ones(4))
    for group in (waiting, other):
        group.close()


def test_who_leaves_wakes_who_waits_for_it_in_the_stage() -> None:
    leaving, waiting = join_all(2)
    with ThreadPoolExecutor(1) as thread:
        call = thread.submit(waiting.tensor.all_reduce, torch.ones(4))
        time.sleep(0.05)
        assert not call.done()
        leaving.close()
        with pytest.raises(GroupBrokenError, match="has left"):
            call.result(timeout=5)
    with pytest.raises(GroupBrokenError, match="told to stop"):
        leaving.tensor.all_reduce(torch.ones(4))
    waiting.close()


def test_who_leaves_takes_nothing_from_a_step_that_it_took_part_in() -> None:
    """A rank that has the last step's result joins the next epoch while others still end it."""
    leaving, behind = join_all(2)
    with ThreadPoolExecutor(1) as thread:
        call = thread.submit(leaving.tensor.all_reduce, torch.ones(4))
        assert behind.tensor.all_reduce(torch.ones(4)).tolist() == [2] * 4
        call.result(timeout=5)
    leaving.broadcast_ids(np.array([7, 8]))
    leaving.close()
    assert behind.broadcast_ids(np.zeros(2, np.int64)).tolist() == [7, 8]
    with pytest.raises(GroupBrokenError, match="has left"):
        behind.tensor.all_reduce(torch.ones(4))
    behind.close()


def test_who_leaves_wakes_who_waits_for_it_in_the_next_stage() -> None:
    first, second = join_all(1, 2)
    with ThreadPoolExecutor(1) as thread:
        call = thread.submit(second.receive, (2, 2), torch.float32, CPU)
        time.sleep(0.05)
        assert not call.done()
        first.close()
        with pytest.raises(GroupBrokenError, match="is gone"):
            call.result(timeout=5)
    second.close()


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_rank_that_never_comes_is_noticed_at_the_deadline(shared_memory: bool) -> None:
    waiting, other = join_all(2, shared_memory=shared_memory, deadline_seconds=1.0)
    began = time.monotonic()
    with pytest.raises(GroupBrokenError):
        waiting.tensor.all_reduce(torch.ones(4))
    assert 0.8 < time.monotonic() - began < 5
    for group in (waiting, other):
        group.close()


def _join_and_wait(port: int, rank: int, pipe: Any, shared_memory: bool) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    meeting = Meeting(store, deadline_seconds=60, shared_memory=shared_memory)
    group, _ = GroupJoin(meeting, ParallelConfig(tensor_parallel_size=2), RankPlace(0, rank)).join(
        CPU
    )
    pipe.send(type(group.tensor).__name__)
    if rank == 1:
        time.sleep(60)
    try:
        group.tensor.all_reduce(torch.ones(4))
    except GroupBrokenError as error:
        pipe.send((time.monotonic(), str(error)))


@pytest.mark.parametrize("shared_memory", [True, False])
def test_the_death_of_a_process_is_noticed_at_once(shared_memory: bool) -> None:
    context = get_context("forkserver")
    context.set_forkserver_preload(["worker.rank"])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, processes = [], []
    for rank in range(2):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_join_and_wait, args=(store.port, rank, theirs, shared_memory), daemon=True
        )
        process.start()
        pipes.append(ours)
        processes.append(process)
    try:
        kind = "SharedMemoryTensorGroup" if shared_memory else "TorchTensorGroup"
        assert [pipe.recv() for pipe in pipes] == [kind, kind]
        time.sleep(0.2)
        assert processes[1].pid is not None
        killed = time.monotonic()
        os.kill(processes[1].pid, signal.SIGKILL)  # a zombie until joined, and dead all the same
        assert pipes[0].poll(10)
        noticed, message = pipes[0].recv()
        assert noticed - killed < 0.5
        assert "has ended" in message or "is gone" in message
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (2, 3)])
def test_stages_pass_activations_in_order(tp: int, pp: int) -> None:
    groups = join_all(tp, pp)

    def run(group: Group) -> list[float]:
        seen = []
        for step in range(20):
            x = torch.full((step + 1, 3), float(step))
            if not group.is_first_stage:
                x = group.receive((step + 1, 3), torch.float32, CPU)
            seen.append(float(x[-1, -1]))
            if not group.is_last_stage:
                group.send(x + 100)
        return seen

    for group, seen in zip(groups, on_all(groups, run), strict=True):
        assert seen == [step + 100.0 * group.stage for step in range(20)]
    assert [group.answers for group in groups] == [
        g.stage == pp - 1 and g.tensor.rank == 0 for g in groups
    ]
    on_all(groups, Group.close)


def test_nothing_is_left_in_dev_shm() -> None:
    before = set(os.listdir("/dev/shm"))
    groups = join_all(3)
    assert set(os.listdir("/dev/shm")) == before
    on_all(groups, Group.close)
