"""The mirror of the block tables: what it holds, and what it refuses."""

import numpy as np
import pytest

from scheduler.messages import (
    Close,
    CloseReason,
    Extend,
    Open,
    SamplingParams,
    SeqRef,
    SeqWork,
    Update,
    pack_token_ids,
)
from worker.errors import MirrorDriftError
from worker.sequence_table import SequenceTable

SAMPLING = SamplingParams(max_tokens=9, seed=0)
A = SeqRef("a", 1)


def table() -> SequenceTable:
    return SequenceTable(num_blocks=40, block_size=4, vocab_size=100)


def opened(
    seq: SeqRef = A,
    token_ids: tuple[int, ...] = (5, 6, 7, 8, 9),
    block_ids: tuple[int, ...] = (3, 4),
    num_computed: int = 0,
    num_prompt_tokens: int | None = None,
) -> Open:
    return Open(
        seq,
        pack_token_ids(token_ids),
        num_prompt_tokens or len(token_ids),
        block_ids,
        num_computed,
        SAMPLING,
    )


def test_a_sequence_lives_through_open_work_extend_and_close() -> None:
    t = table()
    assert t.apply([opened()]) == [(t.row(A), opened())]
    work = t.work([SeqWork(A, 0, 5, True)])
    t.advance(work)
    t.append(work.row_s, np.array([42]))
    t.apply([Extend(A, (), (9,))])
    row = t.row(A)
    assert t.token_ids[row, : t.num_tokens[row]].tolist() == [5, 6, 7, 8, 9, 42]
    assert t.block_ids[row, : t.num_blocks[row]].tolist() == [3, 4, 9]
    assert t.num_computed[row] == 5
    assert t.work([SeqWork(A, 5, 1, True)]).start_s.tolist() == [5]
    t.apply([Close(A, CloseReason.PREEMPTED)])
    assert len(t) == 0


def test_ids_sampled_elsewhere_come_with_extend() -> None:
    t = table()
    t.apply([opened(), Extend(A, (11, 12), ())])
    row = t.row(A)
    assert t.token_ids[row, : t.num_tokens[row]].tolist() == [5, 6, 7, 8, 9, 11, 12]


def test_rows_are_used_again_and_hold_nothing_of_the_one_before() -> None:
    t = table()
    t.apply([opened(num_computed=4), Extend(A, (1,), (9,)), Close(A, CloseReason.FINISHED)])
    b = SeqRef("b", 1)
    t.apply([opened(b, (7,), (2,))])
    row = t.row(b)
    found = (t.num_tokens[row], t.num_prompt_tokens[row], t.num_computed[row], t.num_blocks[row])
    assert found == (1, 1, 0, 1)


def test_the_table_grows_in_every_direction_and_keeps_what_it_holds() -> None:
    t = SequenceTable(num_blocks=5000, block_size=1, vocab_size=100_000)
    refs = [SeqRef(f"r{i}", 1) for i in range(70)]
    tokens = {seq: tuple(range(i + 1, i + 1 + 10 * (i + 1))) for i, seq in enumerate(refs)}
    for i, seq in enumerate(refs):
        t.apply([opened(seq, tokens[seq], tuple(range(1, 10 * (i + 1) + 1)))])
    t.apply([Extend(refs[0], tuple(range(3000)), tuple(range(1, 3000)))])
    for i, seq in enumerate(refs[1:], 1):
        row = t.row(seq)
        assert tuple(t.token_ids[row, : t.num_tokens[row]]) == tokens[seq]
        assert t.num_blocks[row] == 10 * (i + 1)
    row = t.row(refs[0])
    assert t.num_tokens[row] == 3010
    assert t.token_ids[row, 3009] == 2999


def test_a_new_attempt_follows_the_close_of_the_old_one_in_one_plan() -> None:
    t = table()
    t.apply([opened()])
    again = SeqRef("a", 2)
    t.apply([Close(A, CloseReason.PREEMPTED), opened(again)])
    assert t.row(again) is not None
    with pytest.raises(MirrorDriftError, match="open as attempt 2"):
        t.row(A)


def test_what_opens_and_closes_in_one_plan_is_not_reported_as_open() -> None:
    assert table().apply([opened(), Close(A, CloseReason.ABORTED)]) == []


def prepared() -> SequenceTable:
    """A is open: 5 tokens known, 4 computed, blocks for 8."""
    t = table()
    t.apply([opened(num_computed=4)])
    return t


@pytest.mark.parametrize(
    ("updates", "message"),
    [
        ([opened()], "opened while attempt 1 is open"),
        ([opened(SeqRef("a", 2))], "opened while attempt 1 is open"),
        ([Extend(SeqRef("a", 2), (1,), ())], "open as attempt 1"),
        ([Extend(SeqRef("b", 1), (1,), ())], "is not open"),
        ([Close(SeqRef("b", 1), CloseReason.ABORTED)], "is not open"),
        ([Close(SeqRef("a", 2), CloseReason.ABORTED)], "open as attempt 1"),
        ([Extend(A, (), (40,))], r"block ids 40\.\.40, but this pool holds 1\.\.39"),
        ([Extend(A, (), (0,))], r"block ids 0\.\.0"),
        ([Extend(A, (100,), ())], "outside of the vocabulary"),
        ([opened(SeqRef("b", 1), (-1,))], "outside of the vocabulary"),
        ([opened(SeqRef("b", 1), num_computed=5)], "5 of 5 tokens computed"),
        ([opened(SeqRef("b", 1), block_ids=(7,), num_computed=4), opened()], "while attempt 1"),
        ([opened(SeqRef("b", 1), block_ids=(), num_computed=1)], "1 computed tokens in 0 blocks"),
        ([opened(SeqRef("b", 1), num_prompt_tokens=6)], "6 prompt tokens of 5"),
    ],
)
def test_updates_that_contradict_the_mirror_are_refused(
    updates: list[Update], message: str
) -> None:
    with pytest.raises(MirrorDriftError, match=message):
        prepared().apply(updates)


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([SeqWork(A, 3, 1, False)], r"computes \[3, 4\), but here 4 tokens"),
        ([SeqWork(A, 5, 1, False)], r"computes \[5, 6\)"),
        ([SeqWork(A, 4, 2, False)], "5 known"),
        ([SeqWork(A, 4, 0, False)], r"computes \[4, 4\)"),
        ([SeqWork(A, 4, 1, True), SeqWork(A, 4, 1, True)], "two pieces of work"),
        ([SeqWork(SeqRef("a", 3), 4, 1, True)], "open as attempt 1"),
    ],
)
def test_work_that_contradicts_the_mirror_is_refused(pieces: list[SeqWork], message: str) -> None:
    with pytest.raises(MirrorDriftError, match=message):
        prepared().work(pieces)


def test_sampling_before_the_last_known_token_is_drift() -> None:
    t = table()
    t.apply([opened()])
    with pytest.raises(MirrorDriftError, match=r"\[0, 3\) and samples"):
        t.work([SeqWork(A, 0, 3, True)])


def test_work_beyond_the_blocks_is_drift() -> None:
    t = table()
    t.apply([opened(block_ids=(3,))])
    with pytest.raises(MirrorDriftError, match="its blocks hold 4"):
        t.work([SeqWork(A, 0, 5, True)])


def test_refused_work_changes_nothing() -> None:
    t = prepared()
    before = t.num_computed.copy()
    with pytest.raises(MirrorDriftError):
        t.work([SeqWork(A, 0, 1, False)])
    assert (t.num_computed == before).all()
