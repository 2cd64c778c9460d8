"""Tensor and pipeline parallel groups of plain processes give the text of one rank."""

import logging
import time
from pathlib import Path

import pytest

from scheduler.messages import SamplingParams
from tests.support.models import make_model
from tests.support.real_worker import GREEDY, LocalWorker, Server, complete, worker_config
from tests.support.references import Reference, smollm2_references, stories_references
from worker.errors import GroupBrokenError
from worker.launch import ProcessGroup
from worker.pull import pull

SAMPLED = SamplingParams(max_tokens=40, seed=11, temperature=0.8, top_p=0.95, ignore_eos=True)


@pytest.fixture(scope="module")
def references(stories: Path, test_data_dir: Path | None) -> list[Reference]:
    return stories_references(stories, test_data_dir)


def check(directory: Path, references: list[Reference], **settings: int) -> None:
    config = worker_config(**settings)  # type: ignore[arg-type]
    with ProcessGroup(config, directory) as group:
        answers = complete(config, group, [r.prompt_token_ids for r in references], GREEDY)
    for answer, reference in zip(answers, references, strict=True):
        assert answer.token_ids == reference.output_token_ids


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2)])
def test_greedy_ids_over_ranks_and_stages(
    stories: Path, references: list[Reference], tp: int, pp: int
) -> None:
    """With a pool so small that requests are preempted on the way."""
    check(stories, references, tp=tp, pp=pp, num_blocks=40, max_num_batched_tokens=48)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("settings", [{}, {"num_blocks": 30, "block_size": 8}], ids=str)
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (4, 1), (2, 2), (1, 5)])
def test_greedy_ids_over_the_whole_grid(
    stories: Path, references: list[Reference], tp: int, pp: int, settings: dict[str, int]
) -> None:
    check(stories, references, tp=tp, pp=pp, **settings)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (3, 1), (1, 2), (1, 3), (3, 2)])
def test_greedy_ids_of_smollm2(tp: int, pp: int) -> None:
    check(pull("smollm2-135m"), smollm2_references(), tp=tp, pp=pp, num_blocks=300)


def test_ranks_that_hold_the_same_kv_head(tmp_path: Path) -> None:
    """4 query heads over 2 ranks, and one KV head that both hold."""
    directory = make_model("qwen3", tmp_path)
    prompts = [list(range(3, 3 + length)) for length in (5, 17, 40)]
    config = worker_config(max_model_len=128)
    expected = complete(config, LocalWorker(config, directory), prompts)
    config = worker_config(max_model_len=128, tp=2)
    with ProcessGroup(config, directory) as group:
        found = complete(config, group, prompts)
    assert [a.token_ids for a in found] == [a.token_ids for a in expected]


def test_sampled_ids_do_not_depend_on_the_grid(stories: Path, references: list[Reference]) -> None:
    prompts = [reference.prompt_token_ids for reference in references[:6]]
    config = worker_config()
    expected = complete(config, LocalWorker(config, stories), prompts, SAMPLED)
    config = worker_config(tp=2, pp=2, num_blocks=24)
    with ProcessGroup(config, stories) as group:
        found = complete(config, group, prompts, SAMPLED)
    assert [a.token_ids for a in found] == [a.token_ids for a in expected]


def test_ranks_hold_their_heads_in_fp8(stories: Path, references: list[Reference]) -> None:
    prompts = [reference.prompt_token_ids for reference in references[:4]]
    sampling = SamplingParams(max_tokens=1, seed=0, temperature=0.0, logprobs=1)
    config = worker_config(kv_cache_dtype="fp8_e4m3", v_scale=0.1)
    expected = complete(config, LocalWorker(config, stories), prompts, sampling)
    config = worker_config(tp=2, kv_cache_dtype="fp8_e4m3", v_scale=0.1)
    with ProcessGroup(config, stories) as group:
        assert {report.bytes_per_block for report in group.reports} == {2 * 5 * 16 * 2 * 8}
        found = complete(config, group, prompts, sampling)
    # Sums over ranks are rounded elsewhere, and so a key may fall to the other side of a step.
    for ours, alone in zip(found, expected, strict=True):
        assert ours.logprobs[0].logprob == pytest.approx(alone.logprobs[0].logprob, abs=0.05)


def test_without_shared_memory(stories: Path, references: list[Reference]) -> None:
    config = worker_config(tp=2)
    with ProcessGroup(config, stories, shared_memory=False) as group:
        answers = complete(config, group, [r.prompt_token_ids for r in references[:4]], GREEDY)
    for answer, reference in zip(answers, references, strict=False):
        assert answer.token_ids == reference.output_token_ids


def test_a_killed_rank_breaks_the_group_at_once_and_nothing_stays_behind(stories: Path) -> None:
    config = worker_config(tp=2, pp=2)
    with ProcessGroup(config, stories) as group:
        server = Server(config, group)
        for number in range(4):
            server.submit(str(number), list(range(3, 30)))
        for _ in range(5):
            server.step()
        group.kill(1)
        killed = time.monotonic()
        with pytest.raises(GroupBrokenError):
            server.run()
        assert time.monotonic() - killed < 2
        processes = list(group._processes)
    assert not any(process.is_alive() for process in processes)


def test_ranks_that_live_join_the_next_epoch_with_their_weights(
    stories: Path, references: list[Reference]
) -> None:
    config = worker_config(tp=2)
    with ProcessGroup(config, stories) as group:
        server = Server(config, group)
        for number, reference in enumerate(references[:6]):
            server.submit(str(number), reference.prompt_token_ids)
        for loss in range(3):
            for _ in range(4 + loss):
                server.step()
            while server.core.group.window.num_in_flight:  # what is computed is then ignored
                server.core.group.window.answer(group.result().step_id)
            server.lose_group()
        answers = server.run()
    for number, reference in enumerate(references[:6]):
        assert answers[str(number)].token_ids == reference.output_token_ids


def test_what_a_rank_says_reaches_the_caller(tmp_path: Path) -> None:
    with pytest.raises(GroupBrokenError, match=r"rank 0: \w+: .*config\.json"):
        ProcessGroup(worker_config(), tmp_path)


def test_blocks_are_the_minimum_over_ranks(stories: Path, caplog: pytest.LogCaptureFixture) -> None:
    """5 layers over 2 stages are 3 and 2: the first stage's memory holds fewer blocks."""
    caplog.set_level(logging.INFO)
    config = worker_config(pp=2, num_blocks=None, max_model_len=512)
    cache = config.cache.model_copy(update={"kv_cache_memory": 1 << 20})
    with ProcessGroup(config.model_copy(update={"cache": cache}), stories) as group:
        assert [report.bytes_per_block for report in group.reports] == [
            2 * layers * 16 * 4 * 8 * 4 for layers in (3, 2)
        ]
        assert {report.num_blocks for report in group.reports} == {
            (1 << 20) // (6 * 16 * 4 * 8 * 4)
        }
        assert len({report.model_digest for report in group.reports}) == 1
