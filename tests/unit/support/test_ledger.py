"""The ledger believes nobody: each thing a core could get wrong is told to it once."""

import random
from dataclasses import replace

import pytest
from msgspec import structs

from configs import ResolvedCacheConfig
from scheduler.accounting import Accounting
from scheduler.messages import (
    Close,
    CloseReason,
    EndReason,
    FinishReason,
    InterruptionCause,
    Interruptions,
    Open,
    SamplingParams,
    SeqRef,
    SeqWork,
    StepPlan,
    SubmitRequest,
    TokenDelta,
    Update,
    Usage,
    pack_token_ids,
)
from tests.support.episode_config import PIPELINE, EpisodeConfig
from tests.support.fake_model import run_solo
from tests.support.ledger import Ledger, MismatchError, Tracked
from tests.support.workload import Job

PROMPT = (3, 1, 4, 1, 5)
SAMPLING = SamplingParams(max_tokens=4, seed=7, logprobs=0, prompt_logprobs=0)
SOLO = run_solo(PROMPT, SAMPLING, 100)
CONFIG = replace(
    EpisodeConfig.draw(random.Random(0), PIPELINE),
    cache=ResolvedCacheConfig(block_size=4, hash="xxh3_128"),
    takes_at_once=True,
)


class Story:
    """One request of client `left`, told to a ledger event by event."""

    def __init__(self, sampling: SamplingParams = SAMPLING) -> None:
        self.ledger = Ledger(CONFIG)
        message = SubmitRequest("a", "left", pack_token_ids(PROMPT), sampling, 0.0)
        job = Job(message, PROMPT, run_solo(PROMPT, sampling, 100))
        self.tracked: Tracked = self.ledger.accept(job, 0.0, capacity_tokens=40)
        self.now = 0.0

    def plan(self, *parts: Update | SeqWork) -> None:
        updates = tuple(part for part in parts if not isinstance(part, SeqWork))
        work = tuple(part for part in parts if isinstance(part, SeqWork))
        self.now += 1
        self.ledger.on_plan(StepPlan(0, 0, updates, work), self.now)

    def open(self, attempt: int = 1, *, hit: int = 0, known: int = len(PROMPT)) -> None:
        token_ids = pack_token_ids((PROMPT + SOLO.token_ids)[:known])
        seq = SeqRef("a", attempt)
        self.plan(
            Open(seq, token_ids, len(PROMPT), (1, 2), hit, SAMPLING),
            SeqWork(seq, hit, known - hit, True),
        )

    def delta(self, delta: TokenDelta, client_id: str = "left") -> None:
        self.now += 1
        self.ledger.on_delta(client_id, delta, self.now)


def usage(num_output_tokens: int, **changes: object) -> Usage:
    return structs.replace(Usage(len(PROMPT), num_output_tokens, 0), **changes)


FIRST = TokenDelta("a", SOLO.token_ids[:1], SOLO.logprobs[:1], SOLO.prompt_logprobs, usage=usage(1))
SECOND = TokenDelta("a", SOLO.token_ids[1:2], SOLO.logprobs[1:2])
REST = TokenDelta(
    "a", SOLO.token_ids[2:], SOLO.logprobs[2:], finish=FinishReason.LENGTH, usage=usage(4)
)


def test_a_request_without_incident() -> None:
    story = Story()
    story.open()
    for delta in (FIRST, SECOND, REST):
        story.delta(delta)
    assert not story.ledger.live
    assert story.tracked.finish is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": (99,)}, "wrong text: output 0 of a"),
        ({"logprobs": ()}, "wrong logprobs"),
        ({"prompt_logprobs": SOLO.prompt_logprobs[1:]}, "3 prompt logprobs of a at output 0, 4"),
        ({"usage": None}, "usage is due"),
        ({"usage": usage(2)}, "usage of a"),
        ({"usage": usage(1, cached_tokens=4)}, "usage of a"),
        ({"usage": usage(1, interruptions=Interruptions({}, recovered_tokens=1))}, "seen: {}"),
        ({"token_ids": (), "logprobs": (), "prompt_logprobs": ()}, "without tokens"),
        ({"request_id": "b"}, "never was"),
        ({"finish": FinishReason.LENGTH}, "ended with length after 1 of 4 tokens"),
        ({"finish": FinishReason.STOP}, "ended with stop after 1 of 4 tokens"),
        ({"finish": FinishReason.ABORT}, "ended with abort after 1 of 4 tokens"),
        ({"finish": FinishReason.ERROR, "error": "x"}, "ended with error after 1 of 4 tokens"),
        ({"finish": FinishReason.LENGTH, "error": "x"}, "finish and error disagree"),
    ],
)
def test_a_wrong_first_delta(changes: dict[str, object], message: str) -> None:
    story = Story()
    story.open()
    with pytest.raises(MismatchError, match=message):
        story.delta(structs.replace(FIRST, **changes))


def test_news_for_the_wrong_client() -> None:
    story = Story()
    story.open()
    with pytest.raises(MismatchError, match="right got news of left's"):
        story.delta(FIRST, "right")


def test_prompt_logprobs_are_not_given_twice() -> None:
    story = Story()
    story.open()
    story.delta(FIRST)
    again = structs.replace(SECOND, prompt_logprobs=SOLO.prompt_logprobs)
    with pytest.raises(MismatchError, match="4 prompt logprobs of a at output 1, 0 were due"):
        story.delta(again)


def test_usage_is_not_given_without_a_reason() -> None:
    story = Story()
    story.open()
    story.delta(FIRST)
    with pytest.raises(MismatchError, match="usage is not due"):
        story.delta(structs.replace(SECOND, usage=usage(2)))


def test_nothing_follows_the_last_delta() -> None:
    story = Story()
    story.open()
    for delta in (FIRST, SECOND, REST):
        story.delta(delta)
    with pytest.raises(MismatchError, match="has ended"):
        story.delta(REST)


def test_the_last_delta_has_usage() -> None:
    story = Story()
    story.open()
    story.delta(FIRST)
    story.delta(SECOND)
    with pytest.raises(MismatchError, match="has no usage"):
        story.delta(structs.replace(REST, usage=None))


def test_a_stop_text_charges_what_the_client_says() -> None:
    story = Story()
    story.open()
    story.delta(FIRST)
    story.delta(SECOND)
    story.tracked.end_reason = EndReason.STOP
    story.tracked.end_tokens = 1
    with pytest.raises(MismatchError, match="usage of a"):
        story.delta(TokenDelta("a", (), finish=FinishReason.STOP, usage=usage(2)))


def test_a_preemption_is_billed_from_what_was_seen() -> None:
    story = Story()
    story.open()
    story.delta(FIRST)
    story.plan(SeqWork(SeqRef("a", 1), 5, 1, True))  # 6 tokens held
    story.plan(Close(SeqRef("a", 1), CloseReason.PREEMPTED))
    closed_seconds = story.now
    story.open(2, hit=4, known=6)
    bill = Interruptions({InterruptionCause.SLOTS: 1}, 4, 2, story.now + 1 - closed_seconds)
    story.delta(structs.replace(SECOND, usage=usage(2, interruptions=bill)))
    costs = story.ledger.by_cause[InterruptionCause.BLOCKS]
    assert (costs.held, costs.recovered, costs.recomputed, costs.dropped) == (6, 4, 2, 0)
    wrong = structs.replace(bill, recovered_tokens=5)
    with pytest.raises(MismatchError, match="4 tokens recovered and 2 recomputed"):
        story.delta(structs.replace(REST, usage=usage(4, interruptions=wrong)))


def test_a_stall_ends_with_the_first_token_after_it() -> None:
    story = Story()
    story.open()
    story.plan(Close(SeqRef("a", 1), CloseReason.PREEMPTED))
    story.open(2)
    bill = Interruptions({InterruptionCause.BLOCKS: 1}, 0, 5, stalled_seconds=7.0)
    with pytest.raises(MismatchError, match="a stalled for 2"):
        story.delta(structs.replace(FIRST, usage=usage(1, interruptions=bill)))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((SeqWork(SeqRef("b", 1), 0, 1, True),), "does not run"),
        ((SeqWork(SeqRef("a", 2), 5, 1, True),), "does not run"),
        ((Close(SeqRef("a", 2), CloseReason.PREEMPTED),), "does not run"),
        ((Close(SeqRef("a", 1), CloseReason.FINISHED),), "has not been told"),
        ((Open(SeqRef("a", 2), b"", 5, (1,), 0, SAMPLING),), "opened after attempt 1"),
        ((Open(SeqRef("b", 1), b"", 5, (1,), 0, SAMPLING),), "no such request lives"),
    ],
)
def test_a_plan_that_does_not_fit(parts: tuple[Update | SeqWork, ...], message: str) -> None:
    story = Story()
    story.open()
    with pytest.raises(MismatchError, match=message):
        story.plan(*parts)


def test_an_open_carries_what_the_client_has() -> None:
    story = Story()
    story.open()
    story.delta(FIRST)
    story.plan(Close(SeqRef("a", 1), CloseReason.PREEMPTED))
    with pytest.raises(MismatchError, match="is opened with"):
        story.open(2, known=5)
    story = Story()
    with pytest.raises(MismatchError, match="leaves nothing to compute"):
        story.open(hit=5)


def test_books_of_the_core_that_differ() -> None:
    story = Story()
    story.open()
    with pytest.raises(MismatchError, match="tokens planned: 0 booked, 5 seen"):
        story.ledger.compare(Accounting())
