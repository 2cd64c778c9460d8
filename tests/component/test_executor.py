"""One rank: what it answers, what it refuses, and that its tokens are those of transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from scheduler.errors import ProtocolError
from scheduler.messages import (
    Close,
    CloseReason,
    Extend,
    FinishReason,
    Open,
    SamplingParams,
    SeqRef,
    SeqWork,
    StepPlan,
    StepResult,
    pack_token_ids,
)
from tests.support.models import quiet_transformers
from tests.support.real_worker import GREEDY, LocalWorker, Server, complete, worker_config
from tests.support.references import Reference, stories_references
from worker.errors import CacheTooSmallError, MirrorDriftError, WorkerError
from worker.rank import Rank


@pytest.fixture(scope="module")
def references(stories: Path, test_data_dir: Path | None) -> list[Reference]:
    return stories_references(stories, test_data_dir)


@pytest.fixture(scope="module")
def prompts(references: list[Reference]) -> list[list[int]]:
    return [reference.prompt_token_ids for reference in references]


@pytest.fixture
def worker(stories: Path) -> LocalWorker:
    return LocalWorker(worker_config(), stories)


def ask(worker: LocalWorker, *plans: StepPlan) -> list[StepResult]:
    for plan in plans:
        worker.submit(plan)
    return [worker.result() for _ in plans]


A = SeqRef("a", 1)


def opened(seq: SeqRef = A, sampling: SamplingParams = GREEDY, length: int = 5) -> Open:
    blocks = (1,) if seq == A else (2,)
    return Open(seq, pack_token_ids(range(1, length + 1)), length, blocks, 0, sampling)


# -- the text is that of transformers --------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 7, "block_size": 4},
        {"num_blocks": 30, "max_num_batched_tokens": 40},
        {"steps_in_flight": 1, "num_blocks": 60, "block_size": 5, "max_num_seqs": 7},
        {"steps_in_flight": 3, "block_size": 1, "num_blocks": 400},
    ],
    ids=str,
)
def test_greedy_ids_equal_those_of_transformers(
    stories: Path, references: list[Reference], prompts: list[list[int]], settings: dict[str, Any]
) -> None:
    """Whatever the chunks, blocks, batch mates, look-ahead and preemptions."""
    config = worker_config(**settings)
    answers = complete(config, LocalWorker(config, stories), prompts)
    for answer, reference in zip(answers, references, strict=True):
        assert answer.token_ids == reference.output_token_ids


def test_a_prefix_hit_gives_the_same_text(
    stories: Path, references: list[Reference], prompts: list[list[int]]
) -> None:
    config = worker_config(block_size=4)
    server = Server(config, LocalWorker(config, stories))
    for round_ in ("first", "second"):
        for number, prompt in enumerate(prompts[:6]):
            server.submit(f"{round_}{number}", prompt)
        server.run()
    for number, reference in enumerate(references[:6]):
        first, second = (server.answers[f"{name}{number}"] for name in ("first", "second"))
        assert first.token_ids == second.token_ids == reference.output_token_ids
        assert second.usage is not None
        assert second.usage.cached_tokens == (len(prompts[number]) - 1) // 4 * 4


@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "float16", "fp8_e4m3"])
def test_a_rounded_cache_changes_little(
    stories: Path, prompts: list[list[int]], kv_cache_dtype: str
) -> None:
    """Log probabilities of the first token, against those with a float32 cache."""
    sampling = SamplingParams(max_tokens=1, seed=0, temperature=0.0, logprobs=1)
    found = []
    for dtype in ("float32", kv_cache_dtype):
        config = worker_config(kv_cache_dtype=dtype)
        answers = complete(config, LocalWorker(config, stories), prompts, sampling)
        found.append(torch.tensor([answer.logprobs[0].logprob for answer in answers]))
    limit = {"bfloat16": 0.15, "float16": 0.02, "fp8_e4m3": 1.5}[kv_cache_dtype]
    difference = (found[0] - found[1]).abs().max()
    assert 0 < difference < limit


def test_the_scales_of_fp8_decide_what_it_can_hold(stories: Path, prompts: list[list[int]]) -> None:
    """A scale of the values' own order keeps the text; one that cuts all of them off does not."""
    sampling = SamplingParams(max_tokens=1, seed=0, temperature=0.0, logprobs=1)

    def logprobs(**settings: Any) -> torch.Tensor:
        config = worker_config(**settings)
        answers = complete(config, LocalWorker(config, stories), prompts, sampling)
        return torch.tensor([answer.logprobs[0].logprob for answer in answers])

    exact = logprobs()
    scaled = logprobs(kv_cache_dtype="fp8_e4m3", k_scale=0.3, v_scale=0.1)
    assert 0 < (scaled - exact).abs().mean() < 0.2
    for scale in ("k_scale", "v_scale"):
        cut = logprobs(kv_cache_dtype="fp8_e4m3", **{scale: 1e-5})
        assert (cut - exact).abs().mean() > 0.5


def test_the_same_memory_holds_four_times_the_blocks_in_fp8(stories: Path) -> None:
    reports = []
    for dtype in ("float32", "fp8_e4m3"):
        config = worker_config(kv_cache_dtype=dtype, num_blocks=None, max_model_len=512)
        cache = config.cache.model_copy(update={"kv_cache_memory": 1 << 20})
        rank = Rank(config.model_copy(update={"cache": cache}), 0)
        rank.load(stories)
        reports.append(rank.join(0, None))
    wide, narrow = reports
    assert narrow.bytes_per_block == 2 * 5 * 16 * 4 * 8  # K and V, layers, slots, heads, head_dim
    assert wide.bytes_per_block == 4 * narrow.bytes_per_block
    assert narrow.num_blocks == (1 << 20) // narrow.bytes_per_block


# -- log probabilities -----------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [256, 6])
def test_logprobs_of_prompt_and_output_equal_those_of_transformers(
    stories: Path, prompts: list[list[int]], chunk: int
) -> None:
    sampling = SamplingParams(
        max_tokens=8, seed=0, temperature=0.0, logprobs=3, prompt_logprobs=2, ignore_eos=True
    )
    config = worker_config(max_num_batched_tokens=chunk)
    answers = complete(config, LocalWorker(config, stories), prompts[:4], sampling)
    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(stories, dtype=torch.float32)
    for prompt, answer in zip(prompts, answers, strict=False):
        token_ids = prompt + answer.token_ids
        with torch.inference_mode():
            logits = model(torch.tensor([token_ids])).logits[0]
        logprobs = logits.log_softmax(-1)
        rows = answer.prompt_logprobs + answer.logprobs
        assert len(rows) == len(token_ids) - 1
        for position, row in enumerate(rows, 1):
            expected = logprobs[position - 1]
            assert row.logprob == pytest.approx(float(expected[token_ids[position]]), abs=1e-4)
            count = 2 if position < len(prompt) else 3
            assert [value for _, value in row.top] == pytest.approx(
                expected.topk(count).values.tolist(), abs=1e-4
            )
            near = (expected - expected[token_ids[position]]).abs() < 1e-4
            better = int((expected > expected[token_ids[position]]).sum())
            assert abs(row.rank - 1 - better) <= int(near.sum()) - 1


# -- protocol --------------------------------------------------------------------------------


def test_every_plan_is_answered_also_one_of_updates_only(worker: LocalWorker) -> None:
    results = ask(
        worker,
        StepPlan(0, 0, (opened(),), (SeqWork(A, 0, 3, False),)),
        StepPlan(0, 1, (), (SeqWork(A, 3, 2, True),)),
        StepPlan(0, 2, (Close(A, CloseReason.ABORTED),), ()),
    )
    assert [result.step_id for result in results] == [0, 1, 2]
    assert [len(result.outputs) for result in results] == [0, 1, 0]
    [output] = results[1].outputs
    assert output.seq == A
    assert len(output.token_ids) == 1


def test_the_worker_feeds_its_own_token_to_the_next_plan(worker: LocalWorker) -> None:
    """Three plans are out before any result is read; only block updates travel."""
    ahead = ask(
        worker,
        StepPlan(0, 0, (opened(),), (SeqWork(A, 0, 5, True),)),
        StepPlan(0, 1, (), (SeqWork(A, 5, 1, True),)),
        StepPlan(0, 2, (), (SeqWork(A, 6, 1, True),)),
    )
    first, second, _ = (result.outputs[0].token_ids[0] for result in ahead)
    b = SeqRef("b", 1)
    token_ids = (*range(1, 6), first, second)
    opening = Open(b, pack_token_ids(token_ids), 5, (2,), 0, GREEDY)
    [again] = ask(worker, StepPlan(0, 3, (opening,), (SeqWork(b, 0, 7, True),)))
    assert again.outputs[0].token_ids == ahead[2].outputs[0].token_ids


def test_plans_of_an_older_epoch_are_dropped(worker: LocalWorker) -> None:
    worker.join(3)
    assert worker.rank.execute(StepPlan(2, 0, (opened(),), (SeqWork(A, 0, 5, True),))) is None
    [result] = ask(worker, StepPlan(3, 0, (opened(),), (SeqWork(A, 0, 5, True),)))
    assert result.epoch == 3


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (StepPlan(1, 0, (), ()), "epoch 1 reached a worker of epoch 0"),
        (StepPlan(0, 1, (), ()), "step 1 came where step 0 was due"),
    ],
)
def test_a_newer_epoch_and_a_gap_are_faults(
    worker: LocalWorker, plan: StepPlan, message: str
) -> None:
    with pytest.raises(ProtocolError, match=message):
        worker.rank.execute(plan)


def test_drift_is_loud(worker: LocalWorker) -> None:
    with pytest.raises(MirrorDriftError, match="here 0 tokens are computed"):
        worker.rank.execute(StepPlan(0, 0, (opened(),), (SeqWork(A, 1, 4, True),)))


def test_a_rank_of_several_does_not_start_alone(stories: Path) -> None:
    rank = Rank(worker_config(tp=2), 0)
    rank.load(stories)
    with pytest.raises(WorkerError, match="has to meet the others"):
        rank.join(0, None)


def test_a_plan_before_the_join_is_refused() -> None:
    with pytest.raises(WorkerError, match="before it joined"):
        Rank(worker_config(), 0).execute(StepPlan(0, 0, (), ()))


def test_a_sampling_error_ends_one_request_and_the_worker_goes_on(worker: LocalWorker) -> None:
    bad = SeqRef("bad", 1)
    refused = SamplingParams(max_tokens=5, seed=0, allowed_token_ids=(9999,))
    first, second = ask(
        worker,
        StepPlan(
            0,
            0,
            (opened(), opened(bad, refused)),
            (SeqWork(bad, 0, 5, True), SeqWork(A, 0, 5, True)),
        ),
        # Planned before the error was known.
        StepPlan(0, 1, (), (SeqWork(bad, 5, 1, True), SeqWork(A, 5, 1, True))),
    )
    for result in (first, second):
        wrong, right = result.outputs
        assert wrong.error is not None
        assert "9999" in wrong.error
        assert wrong.token_ids == ()
        assert right.error is None
        assert len(right.token_ids) == 1


def test_ids_sent_with_extend_are_computed(worker: LocalWorker) -> None:
    results = ask(
        worker,
        StepPlan(0, 0, (opened(length=3),), (SeqWork(A, 0, 2, False),)),
        StepPlan(0, 1, (Extend(A, (4, 5), ()),), (SeqWork(A, 2, 3, True),)),
    )
    [whole] = ask(
        worker,
        StepPlan(0, 2, (opened(SeqRef("b", 1)),), (SeqWork(SeqRef("b", 1), 0, 5, True),)),
    )
    assert results[1].outputs[0].token_ids == whole.outputs[0].token_ids


# -- size ------------------------------------------------------------------------------------


def test_blocks_from_the_memory_granted(stories: Path) -> None:
    config = worker_config(num_blocks=None, max_model_len=512)
    cache = config.cache.model_copy(update={"kv_cache_memory": 1 << 20})
    worker = LocalWorker(config.model_copy(update={"cache": cache}), stories)
    assert worker.num_blocks == (1 << 20) // (2 * 5 * 16 * 4 * 8 * 4)


def test_too_little_memory_for_one_request(stories: Path) -> None:
    config = worker_config(num_blocks=None, max_model_len=2048)
    cache = config.cache.model_copy(update={"kv_cache_memory": 1 << 20})
    with pytest.raises(CacheTooSmallError, match="set max_model_len to at most 800"):
        LocalWorker(config.model_copy(update={"cache": cache}), stories)


def test_a_request_that_outgrows_the_pool_ends_with_length(stories: Path) -> None:
    config = worker_config(num_blocks=9)
    sampling = SamplingParams(max_tokens=1000, seed=0, temperature=0.0, eos_token_ids=())
    [answer] = complete(config, LocalWorker(config, stories), [list(range(3, 63))], sampling)
    assert answer.finish == FinishReason.LENGTH
    assert len(answer.token_ids) == 8 * 16 + 1 - 60
