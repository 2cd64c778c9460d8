"""The fake worker, given plans made by hand: it obeys good ones and sees what is wrong with bad."""

from dataclasses import dataclass, field

import pytest

from scheduler.messages import (
    Close,
    CloseReason,
    Extend,
    Open,
    SamplingParams,
    SeqOutput,
    SeqRef,
    SeqWork,
    StepPlan,
    StepResult,
    TokenLogprobs,
    Update,
    pack_token_ids,
)
from tests.support.fake_model import run_solo
from tests.support.fake_worker import FakeWorkerGroup, WorkerFaultError, WrongKvError

A, B = SeqRef("a", 1), SeqRef("b", 1)
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3)
SAMPLING = SamplingParams(max_tokens=20, seed=7)


def opened(
    seq: SeqRef,
    block_ids: tuple[int, ...],
    *,
    token_ids: tuple[int, ...] = PROMPT,
    num_computed: int = 0,
    num_prompt_tokens: int = len(PROMPT),
    sampling: SamplingParams = SAMPLING,
) -> Open:
    return Open(
        seq, pack_token_ids(token_ids), num_prompt_tokens, block_ids, num_computed, sampling
    )


@dataclass
class Workers:
    """A group with blocks of 4 slots that carries out one plan at a time."""

    num_stages: int = 1
    group: FakeWorkerGroup = field(init=False)
    next_step_id: int = 0

    def __post_init__(self) -> None:
        self.group = FakeWorkerGroup(self.num_stages, num_blocks=12, block_size=4)

    def plan(self, updates: tuple[Update, ...] = (), work: tuple[SeqWork, ...] = ()) -> StepPlan:
        plan = StepPlan(0, self.next_step_id, updates, work)
        self.next_step_id += 1
        return plan

    def step(self, *parts: Update | SeqWork) -> tuple[SeqOutput, ...]:
        updates = tuple(part for part in parts if not isinstance(part, SeqWork))
        work = tuple(part for part in parts if isinstance(part, SeqWork))
        self.group.publish(self.plan(updates, work))
        for index in range(self.num_stages):
            self.group.advance(index)
        return self.group.results.popleft().outputs


def test_text_is_that_of_the_solo_run_in_chunks_and_one_by_one() -> None:
    solo = run_solo(PROMPT, SAMPLING, 100).token_ids
    workers = Workers()
    assert workers.step(opened(A, (5, 2)), SeqWork(A, 0, 7, False)) == ()
    (output,) = workers.step(Extend(A, (), (9,)), SeqWork(A, 7, 3, True))
    received = [*output.token_ids]
    for position in range(10, 16):
        blocks = (1,) if position == 12 else ()
        (output,) = workers.step(Extend(A, (), blocks), SeqWork(A, position, 1, True))
        received += output.token_ids
    assert tuple(received) == solo[:7]


def test_text_is_the_same_over_three_stages() -> None:
    solo = run_solo(PROMPT, SAMPLING, 100).token_ids
    workers = Workers(num_stages=3)
    (output,) = workers.step(opened(A, (5, 2, 9)), SeqWork(A, 0, 10, True))
    received = output.token_ids
    for position in range(10, 12):
        (output,) = workers.step(Extend(A, received[-1:], ()), SeqWork(A, position, 1, True))
        received += output.token_ids
    assert received == solo[:3]


def test_looking_ahead_needs_no_answer_in_between() -> None:
    group = FakeWorkerGroup(1, num_blocks=12, block_size=4)
    group.publish(
        StepPlan(0, 0, (opened(A, (5, 2, 9)),), (SeqWork(A, 0, 10, True),)),
    )
    group.publish(StepPlan(0, 1, (), (SeqWork(A, 10, 1, True),)))
    group.advance(0)
    group.advance(0)
    tokens = [output.token_ids[0] for result in group.results for output in result.outputs]
    assert tuple(tokens) == run_solo(PROMPT, SAMPLING, 100).token_ids[:2]


def test_a_block_written_in_the_same_plan_can_be_read() -> None:
    workers = Workers()
    outputs = workers.step(
        opened(A, (1, 2, 3)),
        opened(B, (1, 2, 4), num_computed=8),
        SeqWork(B, 8, 2, True),
        SeqWork(A, 0, 10, True),
    )
    assert outputs[0].token_ids == outputs[1].token_ids


def test_a_block_nobody_wrote_is_seen() -> None:
    workers = Workers()
    with pytest.raises(WrongKvError, match=r"position 0 \(block 6\) should hold .* holds nothing"):
        workers.step(opened(A, (6, 7, 8), num_computed=8), SeqWork(A, 8, 2, True))


def test_a_block_written_over_is_seen() -> None:
    workers = Workers()
    workers.step(opened(A, (1, 2, 3)), SeqWork(A, 0, 10, True))
    workers.step(opened(B, (4, 2, 5), token_ids=tuple(range(10))), SeqWork(B, 0, 10, True))
    with pytest.raises(WrongKvError, match=r"position 4 \(block 2\) .*holds token 4 at position 4"):
        workers.step(SeqWork(A, 10, 1, True))


def test_a_block_of_equal_tokens_after_another_prefix_is_seen() -> None:
    workers = Workers()
    workers.step(opened(A, (1, 2, 3)), SeqWork(A, 0, 10, True))
    other = (8, 8, 8, 8, *PROMPT[4:])
    workers.step(opened(B, (4, 5, 6), token_ids=other), SeqWork(B, 0, 4, False))
    again = SeqRef("b", 2)
    with pytest.raises(WrongKvError, match=r"position 4 \(block 2\)"):
        workers.step(
            Close(B, CloseReason.PREEMPTED),
            opened(again, (4, 2, 5), token_ids=other, num_computed=8),
            SeqWork(again, 8, 2, True),
        )


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((SeqWork(B, 0, 4, False),), "is not open"),
        ((SeqWork(SeqRef("a", 2), 10, 1, True),), "attempt 1 is open"),
        ((SeqWork(A, 9, 1, True),), "mirror has 10 computed"),
        ((SeqWork(A, 10, 2, True),), "only 11 tokens are known"),
        ((SeqWork(A, 10, 0, False),), "mirror has 10 computed"),
        ((opened(A, (5,)),), "while it is open"),
        ((Extend(A, (1,), ()),), "sampled itself"),
        ((Extend(A, (), (0,)),), "got block 0 of 12"),
        ((Extend(A, (), (12,)),), "got block 12 of 12"),
        ((Extend(A, (), (2,)),), "holds a block twice"),
        ((Extend(B, (), (5,)),), "is not open"),
        ((Close(B, CloseReason.FINISHED),), "is not open"),
        ((opened(B, (5, 6, 7), num_computed=10),), "10 computed of 10 tokens"),
        ((opened(B, (5, 6)), SeqWork(B, 0, 10, True)), "more than the 2 blocks"),
        ((opened(B, (5, 6, 7)), SeqWork(B, 0, 8, True)), "samples before token 10"),
    ],
)
def test_a_plan_that_contradicts_the_mirror_is_a_fault(
    parts: tuple[Update | SeqWork, ...], message: str
) -> None:
    workers = Workers()
    workers.step(opened(A, (1, 2, 3)), SeqWork(A, 0, 10, True))
    with pytest.raises(WorkerFaultError, match=message):
        workers.step(*parts)


def test_a_gap_in_the_steps_is_a_fault() -> None:
    workers = Workers()
    workers.step()
    workers.plan()
    with pytest.raises(WorkerFaultError, match="expects step 1 of epoch 0, got step 2"):
        workers.step()


def test_a_closed_table_can_be_opened_again() -> None:
    workers = Workers()
    (first,) = workers.step(opened(A, (1, 2, 3)), SeqWork(A, 0, 10, True))
    again = SeqRef("a", 2)
    (second,) = workers.step(
        Close(A, CloseReason.PREEMPTED),
        opened(again, (1, 2, 7), num_computed=8),
        SeqWork(again, 8, 2, True),
    )
    assert second.token_ids == first.token_ids


def test_prompt_logprobs_come_in_rows_that_join() -> None:
    sampling = SamplingParams(max_tokens=5, seed=1, logprobs=1, prompt_logprobs=2)
    solo = run_solo(PROMPT, sampling, 100)
    workers = Workers()
    rows: list[TokenLogprobs] = []
    next_position = 1
    for start, end in ((0, 3), (3, 4), (4, 10)):
        updates = (opened(A, (1, 2, 3), sampling=sampling),) if start == 0 else ()
        (output,) = workers.step(*updates, SeqWork(A, start, end - start, end == 10))
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs.first_position == next_position
        rows += output.prompt_logprobs.rows
        next_position += len(output.prompt_logprobs.rows)
    assert tuple(rows) == solo.prompt_logprobs
    assert output.logprobs == solo.logprobs[:1]


def test_a_poisoned_request_fails_and_no_other() -> None:
    workers = Workers()
    workers.group.poison("a")
    bad, good = workers.step(
        opened(A, (1, 2, 3)),
        opened(B, (4, 5, 6)),
        SeqWork(A, 0, 10, True),
        SeqWork(B, 0, 10, True),
    )
    assert bad.error is not None
    assert good.token_ids == run_solo(PROMPT, SAMPLING, 100).token_ids[:1]
    (again,) = workers.step(SeqWork(A, 10, 1, True))
    assert again.error is not None


def test_stages_work_out_of_step_and_in_order() -> None:
    workers = Workers(num_stages=2)
    group = workers.group
    group.publish(workers.plan((opened(A, (1, 2, 3)),), (SeqWork(A, 0, 10, True),)))
    group.publish(workers.plan((opened(B, (4, 5, 6)),), (SeqWork(B, 0, 10, True),)))
    assert group.ready() == [0]
    group.advance(0)
    assert group.ready() == [0, 1]
    group.advance(0)
    assert group.ready() == [1]
    group.advance(1)
    group.advance(1)
    assert group.ready() == []
    assert [result.step_id for result in group.results] == [0, 1]


def test_a_stage_that_works_on_something_else_gives_other_text() -> None:
    plans = Workers(num_stages=2)
    group = plans.group
    group.publish(
        plans.plan(
            (opened(A, (1, 2, 3)), opened(B, (4, 5, 6), token_ids=tuple(range(10)))),
            (SeqWork(A, 0, 10, True), SeqWork(B, 0, 10, True)),
        )
    )
    group.publish(plans.plan())
    swapped = StepPlan(0, 0, group.queues[1][0].updates, group.queues[1][0].work[::-1])
    group.queues[1][0] = swapped
    group.advance(0)
    group.advance(1)
    result: StepResult = group.results[0]
    tokens = {output.seq.request_id: output.token_ids for output in result.outputs}
    assert tokens["a"] != run_solo(PROMPT, SAMPLING, 100).token_ids[:1]
