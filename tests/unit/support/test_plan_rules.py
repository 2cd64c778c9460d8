"""The rules of a plan: each is broken once by hand."""

import random
from dataclasses import replace

import pytest

from configs import ResolvedCacheConfig, ResolvedSchedulerConfig
from scheduler.block_pool import BlockPool, Evictions
from scheduler.messages import (
    Close,
    CloseReason,
    Extend,
    Open,
    SamplingParams,
    SeqRef,
    SeqWork,
    StepPlan,
    SubmitRequest,
    Update,
    pack_token_ids,
)
from scheduler.prefix_cache import PrefixMap
from tests.support.episode_config import PIPELINE, EpisodeConfig
from tests.support.fake_model import run_solo
from tests.support.ledger import Ledger, MismatchError
from tests.support.plan_rules import PlanRules
from tests.support.workload import Job

PROMPT = tuple(range(10))
SAMPLING = SamplingParams(max_tokens=20, seed=7)


class Rules:
    """Requests a, b and c (c under a salt) before plans of 16 tokens for at most 2 of them."""

    def __init__(self, num_stages: int = 1) -> None:
        config = replace(
            EpisodeConfig.draw(random.Random(0), PIPELINE),
            scheduler=ResolvedSchedulerConfig(
                max_num_seqs=2,
                max_num_batched_tokens=16,
                steps_in_flight=num_stages + 1,
                long_prefill_token_threshold=10,
            ),
            cache=ResolvedCacheConfig(block_size=4, hash="xxh3_128"),
            num_blocks=12,
            num_stages=num_stages,
        )
        ledger = Ledger(config)
        for request_id in "abc":
            message = SubmitRequest(
                request_id=request_id,
                client_id="left",
                prompt_token_ids=pack_token_ids(PROMPT),
                sampling=SAMPLING,
                arrival_seconds=0,
                cache_salt="red" if request_id == "c" else "",
            )
            ledger.accept(Job(message, PROMPT, run_solo(PROMPT, SAMPLING, 100)), 0.0, 44)
        self.rules = PlanRules(config, ledger, config.num_blocks)
        self.pool = BlockPool(config.num_blocks, PrefixMap(), Evictions())

    def plan(self, *parts: Update | SeqWork) -> None:
        updates = tuple(part for part in parts if not isinstance(part, SeqWork))
        work = tuple(part for part in parts if isinstance(part, SeqWork))
        self.rules.on_plan(StepPlan(0, 0, updates, work))

    def findable(self, block_hash: bytes) -> int:
        """Give out a block and let it be found."""
        (block_id,) = self.pool.allocate(1)
        self.pool.register(block_id, block_hash)
        return block_id


def seq(request_id: str) -> SeqRef:
    return SeqRef(request_id, 1)


def opened(request_id: str, *block_ids: int, num_computed: int = 0) -> Open:
    return Open(seq(request_id), pack_token_ids(PROMPT), 10, block_ids, num_computed, SAMPLING)


def work(request_id: str, start: int, num_tokens: int, *, sample: bool = False) -> SeqWork:
    return SeqWork(seq(request_id), start, num_tokens, sample)


def test_a_good_plan_passes() -> None:
    rules = Rules()
    rules.plan(opened("a", 1, 2), opened("b", 1, 3, num_computed=4), work("a", 0, 8))
    rules.plan(Extend(seq("a"), (), (5,)), work("a", 8, 2, sample=True), work("b", 4, 4))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((opened("a", 1), work("a", 0, 1), work("a", 1, 1)), "planned twice"),
        ((opened("a", 1), opened("b", 2), work("a", 0, 9), work("b", 0, 9)), "more than 16 tokens"),
        ((opened("a", 1), opened("b", 2), work("a", 0, 11), work("b", 0, 4)), "threshold 10"),
        ((opened("a", 1), opened("b", 2), opened("c", 3)), "3 tables are open, of at most 2"),
        ((opened("a", 1, 2, num_computed=5),), "ends within a block"),
        ((opened("a", 1, 2), opened("c", 1, 3, num_computed=4)), "with salt 'red' hits block 1"),
        ((opened("d", 1),), "d, which does not live"),
    ],
)
def test_a_bad_plan_is_refused(parts: tuple[Update | SeqWork, ...], message: str) -> None:
    with pytest.raises(MismatchError, match=message):
        Rules().plan(*parts)


def test_one_request_in_two_plans_of_a_pipeline_is_refused() -> None:
    rules = Rules(num_stages=3)
    rules.plan(opened("a", 1, 2), work("a", 0, 4))
    with pytest.raises(MismatchError, match="two plans in flight"):
        rules.plan(work("a", 4, 4))


def test_a_result_makes_room_for_the_next_work_of_a_request() -> None:
    rules = Rules(num_stages=3)
    rules.plan(opened("a", 1, 2), work("a", 0, 4))
    rules.rules.on_result()
    rules.plan(work("a", 4, 4))


def test_a_plan_of_a_pipeline_takes_only_its_share_of_the_decodes() -> None:
    rules = Rules(num_stages=3)
    rules.plan(opened("a", 1, 2, 3), opened("b", 4, 5, 6), work("a", 0, 8), work("b", 0, 8))
    rules.rules.on_result()
    with pytest.raises(MismatchError, match="2 of 2 requests decode"):
        rules.plan(work("a", 8, 1, sample=True), work("b", 8, 1, sample=True))


def test_a_block_may_be_found_once_it_is_filled() -> None:
    rules = Rules()
    block_id = rules.findable(b"text")
    with pytest.raises(MismatchError, match="no plan that went out fills it"):
        rules.rules.check_findable(rules.pool)
    rules.plan(opened("a", block_id, 2), work("a", 0, 3))
    with pytest.raises(MismatchError, match="no plan that went out fills it"):
        rules.rules.check_findable(rules.pool)
    rules.plan(work("a", 3, 1))
    rules.rules.check_findable(rules.pool)


def test_a_block_may_not_be_found_as_something_else() -> None:
    rules = Rules()
    block_id = rules.findable(b"text")
    rules.plan(opened("a", block_id, 2), work("a", 0, 4))
    rules.rules.check_findable(rules.pool)
    rules.pool.forget(block_id)
    rules.pool.register(block_id, b"other text")
    with pytest.raises(MismatchError, match="no plan that went out fills it"):
        rules.rules.check_findable(rules.pool)
    rules.plan(Close(seq("a"), CloseReason.FINISHED), opened("b", block_id), work("b", 0, 4))
    rules.rules.check_findable(rules.pool)
