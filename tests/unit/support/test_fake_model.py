"""The fake model: its text follows from its prompt, its seed and the rules of stopping."""

from msgspec import structs

from scheduler.messages import FinishReason, SamplingParams
from tests.support.fake_model import (
    START,
    VOCABULARY,
    cells_of,
    describe_cell,
    next_cell,
    run_solo,
    sample_token,
    token_logprobs,
)

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
SAMPLING = SamplingParams(max_tokens=30, seed=7)


def test_a_cell_tells_its_token_and_its_position() -> None:
    cells = cells_of(PROMPT)
    assert "token 4 at position 2" in describe_cell(cells[2])
    assert "token 1 at position 3" in describe_cell(cells[3])


def test_equal_tokens_after_another_prefix_are_other_cells() -> None:
    first, second = cells_of((1, 2, 3)), cells_of((4, 2, 3))
    assert not set(first) & set(second)


def test_cells_grow_one_at_a_time() -> None:
    cell = START
    for position, token_id in enumerate(PROMPT):
        cell = next_cell(cell, position, token_id)
    assert cell == cells_of(PROMPT)[-1]


def test_a_token_depends_on_kv_seed_and_position() -> None:
    def tokens(digest: int, seed: int, first: int) -> list[int]:
        sampling = structs.replace(SAMPLING, seed=seed)
        return [sample_token(digest, first + i, 8, sampling) for i in range(20)]

    assert tokens(10, 7, 8) == tokens(10, 7, 8)
    assert tokens(10, 7, 8) != tokens(11, 7, 8)
    assert tokens(10, 7, 8) != tokens(10, 8, 8)
    assert tokens(10, 7, 8) != tokens(10, 7, 9)


def test_runs_to_max_tokens_or_to_the_context_length() -> None:
    assert len(run_solo(PROMPT, SAMPLING, 100).token_ids) == 30
    cut = run_solo(PROMPT, SAMPLING, 20)
    assert len(cut.token_ids) == 12
    assert cut.finish is FinishReason.LENGTH
    assert cut.token_ids == run_solo(PROMPT, SAMPLING, 100).token_ids[:12]


def test_stops_at_and_with_the_first_stop_id() -> None:
    free = run_solo(PROMPT, SAMPLING, 100).token_ids
    stop = free[9]
    first = free.index(stop)
    for field in ("eos_token_ids", "stop_token_ids"):
        stopped = run_solo(PROMPT, structs.replace(SAMPLING, **{field: (stop,)}), 100)
        assert stopped.token_ids == free[: first + 1]
        assert stopped.finish is FinishReason.STOP


def test_ignore_eos_leaves_stop_ids_alone() -> None:
    free = run_solo(PROMPT, SAMPLING, 100).token_ids
    ignoring = structs.replace(SAMPLING, eos_token_ids=(free[3],), ignore_eos=True)
    assert run_solo(PROMPT, ignoring, 100).token_ids == free
    stopping = structs.replace(ignoring, stop_token_ids=(free[3],))
    assert run_solo(PROMPT, stopping, 100).finish is FinishReason.STOP


def test_min_tokens_masks_what_would_stop() -> None:
    all_but_one = tuple(range(1, VOCABULARY))
    sampling = structs.replace(SAMPLING, stop_token_ids=all_but_one, min_tokens=5)
    token_ids = run_solo(PROMPT, sampling, 100).token_ids
    assert token_ids[:5] == (0, 0, 0, 0, 0)
    assert len(token_ids) > 5
    assert token_ids[-1] != 0


def test_logprobs_rate_each_token_after_what_precedes_it() -> None:
    solo = run_solo(PROMPT, structs.replace(SAMPLING, logprobs=2, prompt_logprobs=1), 100)
    cells = cells_of(PROMPT + solo.token_ids)
    assert solo.prompt_logprobs == tuple(
        token_logprobs(cells[i - 1], PROMPT[i], 1) for i in range(1, len(PROMPT))
    )
    assert solo.logprobs == tuple(
        token_logprobs(cells[len(PROMPT) + i - 1], token_id, 2)
        for i, token_id in enumerate(solo.token_ids)
    )
    assert run_solo(PROMPT, SAMPLING, 100).logprobs == ()
