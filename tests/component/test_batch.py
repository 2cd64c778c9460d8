"""Flat batches against the definition, token by token."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from scheduler.messages import Open, SamplingParams, SeqRef, SeqWork, pack_token_ids
from worker.batch import flat_batch
from worker.sequence_table import SequenceTable

CPU = torch.device("cpu")


@st.composite
def plans(draw: st.DrawFn) -> tuple[int, list[tuple[int, int, int]]]:
    """Block size, and for each sequence: computed, new and later tokens."""
    block_size = draw(st.sampled_from([1, 3, 4, 16]))
    counts = st.tuples(st.integers(0, 40), st.integers(1, 30), st.integers(0, 5))
    return block_size, draw(st.lists(counts, min_size=1, max_size=6))


@given(plans(), st.integers(0, 2**32))
def test_every_token_has_its_id_position_and_slot(
    plan: tuple[int, list[tuple[int, int, int]]], seed: int
) -> None:
    block_size, counts = plan
    rng = np.random.default_rng(seed)
    table = SequenceTable(num_blocks=1000, block_size=block_size, vocab_size=50)
    free = rng.permutation(np.arange(1, 1000)).tolist()
    pieces, expected, tables = [], [], []
    for number, (computed, new, later) in enumerate(counts):
        known = computed + new + later
        token_ids = rng.integers(0, 50, known).tolist()
        blocks = [free.pop() for _ in range(-(-known // block_size))]
        seq = SeqRef(str(number), 1)
        opening = Open(
            seq,
            pack_token_ids(token_ids),
            known,
            tuple(blocks),
            computed,
            SamplingParams(max_tokens=1, seed=0),
        )
        table.apply([opening])
        pieces.append(SeqWork(seq, computed, new, sample=later == 0))
        tables.append(blocks)
        expected += [
            (token_ids[p], p, blocks[p // block_size] * block_size + p % block_size)
            for p in range(computed, computed + new)
        ]
    batch = flat_batch(table.work(pieces), table, block_size=block_size, device=CPU)
    found = zip(
        batch.token_ids_t.tolist(),
        batch.position_ids_t.tolist(),
        batch.attention.slot_t.tolist(),
        strict=True,
    )
    assert list(found) == expected
    assert batch.attention.kv_len_s.tolist() == [computed + new for computed, new, _ in counts]
    assert np.diff(batch.attention.query_start_s1.numpy()).tolist() == [n for _, n, _ in counts]
    for s, (computed, new, _) in enumerate(counts):
        used = -(-(computed + new) // block_size)
        assert batch.attention.block_ids_sb[s, :used].tolist() == tables[s][:used]
    ends = np.cumsum([new for _, new, _ in counts]) - 1
    sampled = [s for s, (_, _, later) in enumerate(counts) if later == 0]
    assert batch.sampled_k.tolist() == sampled
    assert batch.last_token_k.tolist() == ends[sampled].tolist()
