"""A rank among others, from epoch to epoch."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist

from configs import ResolvedConfig
from scheduler.messages import Open, SeqRef, SeqWork, StepPlan, pack_token_ids
from tests.support.real_worker import GREEDY, worker_config
from worker.device import MemoryGrant
from worker.distributed import Meeting
from worker.rank import Rank

T = TypeVar("T")
SEQ = SeqRef("r", 0)
PLAN = StepPlan(
    epoch=0,
    step_id=0,
    updates=(Open(SEQ, pack_token_ids(range(3, 12)), 9, (1,), 0, GREEDY),),
    work=(SeqWork(SEQ, 0, 9, sample=True),),
)


class ProfilingRank(Rank):
    """On a CPU, but as ranks on GPUs are: goes through a step before it claims memory, and warms
    up."""

    _compiles = True

    def _grant(self) -> MemoryGrant:
        self._largest_step()
        return MemoryGrant(1 << 22, "a test")

    def num_touched(self) -> int:
        """Blocks in which something was written."""
        assert self._shard is not None
        return len(self._shard.cache.layers[0].k_NBGD.flatten(1).any(1).nonzero())

    def num_summed(self) -> int:
        """The ranks whose parts a decoder's sums are made of."""
        return int(self._seat.all_reduce(torch.ones(1)).item())


def loaded_rank(config: ResolvedConfig, number: int, directory: Path) -> ProfilingRank:
    rank = ProfilingRank(config, number)
    rank.load(directory)
    return rank


def on_all(ranks: Sequence[ProfilingRank], call: Callable[[ProfilingRank], T]) -> list[T]:
    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(call, ranks))


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2)])
def test_a_newcomer_profiles_without_the_ranks_that_already_have(
    stories: Path, tp: int, pp: int
) -> None:
    config = worker_config(tp=tp, pp=pp, num_blocks=None, max_model_len=256)
    ranks = [loaded_rank(config, number, stories) for number in range(tp * pp)]
    for epoch in range(3):
        meeting = Meeting(dist.HashStore(), deadline_seconds=5)

        def join(rank: Rank, epoch: int = epoch, meeting: Meeting = meeting) -> int:
            return rank.join(epoch, meeting).num_blocks

        assert len(set(on_all(ranks, join))) == 1
        assert on_all(ranks, ProfilingRank.num_summed) == [tp] * len(ranks)
        on_all(ranks, Rank.leave)
        lost = (len(ranks) - 1 - epoch) % len(ranks)
        ranks[lost] = loaded_rank(config, lost, stories)


def test_the_logits_of_a_rank_apart_from_its_peers_are_as_wide_as_the_vocabulary(
    stories: Path,
) -> None:
    """So that a profile sees the memory that they take."""
    decoder = loaded_rank(worker_config(tp=2), 1, stories)._loaded()
    with torch.inference_mode():
        logits_sV = decoder.logits(torch.zeros(3, decoder.spec.hidden_size))
    assert logits_sV.shape == (3, decoder.spec.vocab_size)


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("num_blocks", [2, 3, 200])
def test_a_group_warms_up_and_starts_empty(
    stories: Path, tp: int, pp: int, num_blocks: int
) -> None:
    config = worker_config(tp=tp, pp=pp, num_blocks=num_blocks)
    ranks = [loaded_rank(config, number, stories) for number in range(tp * pp)]
    meeting = Meeting(dist.HashStore(), deadline_seconds=5)
    on_all(ranks, lambda rank: rank.join(0, meeting))
    assert all(rank.num_touched() == min(num_blocks - 1, 3) for rank in ranks)
    assert [rank.num_open for rank in ranks] == [0] * len(ranks)
    [warm] = filter(None, on_all(ranks, lambda rank: rank.execute(PLAN)))
    on_all(ranks, Rank.leave)
    cold = Rank(worker_config(), 0)
    cold.load(stories)
    cold.join(0, None)
    result = cold.execute(PLAN)
    assert result is not None
    assert warm.outputs == result.outputs
