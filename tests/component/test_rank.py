"""A rank among others, from epoch to epoch."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist

from configs import ResolvedConfig
from tests.support.real_worker import worker_config
from worker.device import MemoryGrant
from worker.distributed import Meeting
from worker.rank import Rank

T = TypeVar("T")


class ProfilingRank(Rank):
    """On a CPU, but going through a step before it claims memory, as ranks on GPUs do."""

    def _grant(self) -> MemoryGrant:
        self._largest_step()
        return MemoryGrant(1 << 22, "a test")

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
