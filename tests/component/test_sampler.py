"""Every sampling parameter against its definition, and independence from batch mates."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from scheduler.messages import Open, SamplingParams, SeqRef, pack_token_ids
from worker.randomness import as_seed, uniforms
from worker.sampler import Sampled, Sampler
from worker.sampling_table import SamplingTable
from worker.sequence_table import SequenceTable

VOCAB = 50
LARGE_VOCAB = 3000


class Desk:
    """A sampler with open sequences, one per row."""

    def __init__(self, vocab_size: int = VOCAB) -> None:
        self.vocab_size = vocab_size
        self.table = SequenceTable(num_blocks=1000, block_size=4, vocab_size=vocab_size)
        self.sampling = SamplingTable(vocab_size=vocab_size, device=torch.device("cpu"))
        self.sampler = Sampler(self.sampling, self.table)
        self._count = 0

    def open(
        self, prompt: tuple[int, ...] = (1, 2, 3), output: tuple[int, ...] = (), **params: Any
    ) -> int:
        self._count += 1
        seq = SeqRef(str(self._count), 1)
        sampling = SamplingParams(**{"max_tokens": 99, "seed": 0, **params})
        opening = Open(
            seq, pack_token_ids(prompt + output), len(prompt), tuple(range(1, 100)), 0, sampling
        )
        [(row, _)] = self.table.apply([opening])
        self.sampling.open(row, sampling)
        return row

    def sample(self, logits_kV: Tensor, rows: list[int]) -> Sampled:
        return self.sampler.sample(logits_kV.clone(), np.array(rows))

    def sample_one(self, logits_V: Tensor, row: int) -> int:
        sampled = self.sample(logits_V[None], [row])
        assert sampled.errors == [None]
        return int(sampled.token_id_k[0])


def random_logits(*shape: int, seed: int = 0, spread: float = 2.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * spread


def frequencies(logits_V: Tensor, num_draws: int = 4000, **params: Any) -> np.ndarray:
    """How often each id is drawn over that many seeds."""
    desk = Desk(len(logits_V))
    rows = [desk.open(seed=seed, **params) for seed in range(num_draws)]
    sampled = desk.sample(logits_V.expand(num_draws, -1), rows)
    assert set(sampled.errors) == {None}
    return np.bincount(sampled.token_id_k, minlength=len(logits_V)) / num_draws


def assert_distribution(found: np.ndarray, expected: Tensor) -> None:
    """Exact zeros, and elsewhere within five standard deviations and three draws."""
    p = expected.double().numpy()
    assert not found[p == 0].any()
    assert (np.abs(found - p) <= 5 * np.sqrt(p * (1 - p) / 4000) + 3 / 4000).all()


# -- random numbers ------------------------------------------------------------------------


def test_random_numbers_are_pinned() -> None:
    """They are part of what a seed promises: another release must draw the same tokens."""
    seeds = np.array([0, 0, 1, as_seed(-1), as_seed(2**80 + 5)], np.uint64)
    found = uniforms(seeds, np.array([0, 1, 0, 7, 7]))
    assert found.tolist() == [
        0.6524484863740321,
        0.7012121095215251,
        0.36818951565166946,
        0.7238582745899125,
        0.6874643912119145,
    ]


def test_random_numbers_are_uniform_and_unrelated() -> None:
    for seeds, positions in (
        (np.zeros(100_000, np.uint64), np.arange(100_000)),
        (np.arange(100_000, dtype=np.uint64), np.zeros(100_000, np.int64)),
        (np.arange(100_000, dtype=np.uint64), np.arange(100_000)),
    ):
        u = uniforms(seeds, positions)
        assert 0 <= u.min() <= u.max() < 1
        counts = np.bincount((u * 64).astype(int), minlength=64)
        chi_square = ((counts - 100_000 / 64) ** 2 / (100_000 / 64)).sum()
        assert chi_square < 63 + 5 * np.sqrt(2 * 63)
        assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.02


# -- one parameter at a time ----------------------------------------------------------------


def test_temperature_zero_takes_the_likeliest_and_the_smallest_id_of_equals() -> None:
    desk = Desk()
    logits = random_logits(VOCAB)
    assert desk.sample_one(logits, desk.open(temperature=0.0)) == int(logits.argmax())
    logits[[7, 9, 30]] = 99.0
    assert desk.sample_one(logits, desk.open(temperature=0.0)) == 7


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_temperature(temperature: float) -> None:
    logits = random_logits(VOCAB)
    expected = (logits / temperature).softmax(0)
    assert_distribution(frequencies(logits, temperature=temperature), expected)


@pytest.mark.parametrize("top_k", [1, 2, 7, 49, 50, 1000])
def test_top_k(top_k: int) -> None:
    logits = random_logits(VOCAB)
    kept = logits.sort(descending=True, stable=True).indices[:top_k]
    expected = torch.full_like(logits, float("-inf")).index_copy(0, kept, logits[kept]).softmax(0)
    assert_distribution(frequencies(logits, top_k=top_k), expected)


def top_p_mask(p: Tensor, top_p: float) -> Tensor:
    """The smallest likeliest set whose mass reaches top_p."""
    order = p.sort(descending=True, stable=True).indices
    before = p[order].cumsum(0) - p[order]
    kept = torch.zeros_like(p, dtype=torch.bool)
    kept[order[before < top_p]] = True
    return kept


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("vocab_size", [VOCAB, LARGE_VOCAB])
def test_top_p(top_p: float, vocab_size: int) -> None:
    p = random_logits(vocab_size).double().softmax(0)
    kept = p * top_p_mask(p, top_p)
    assert_distribution(frequencies(p.log().float(), top_p=top_p), kept / kept.sum())


def test_top_p_counts_within_top_k_and_min_p() -> None:
    p = random_logits(VOCAB).double().softmax(0)
    survivors = torch.where(p >= 0.05 * p.max(), p, 0)
    survivors[survivors < survivors.sort(descending=True).values[8]] = 0
    survivors /= survivors.sum()
    kept = survivors * top_p_mask(survivors, 0.7)
    found = frequencies(p.log().float(), top_k=9, min_p=0.05, top_p=0.7)
    assert_distribution(found, kept / kept.sum())


@pytest.mark.parametrize("min_p", [0.01, 0.2, 1.0])
def test_min_p_is_relative_to_the_likeliest_after_temperature(min_p: float) -> None:
    logits = random_logits(VOCAB)
    p = (logits.double() / 0.7).softmax(0)
    kept = torch.where(p >= min_p * p.max() * (1 - 1e-6), p, 0)
    assert_distribution(frequencies(logits, min_p=min_p, temperature=0.7), kept / kept.sum())


def test_a_flat_distribution_needs_the_whole_vocabulary() -> None:
    """Neither the likeliest 64 nor 1,024 reach the cut, and every id ties with every other."""
    logits = torch.zeros(LARGE_VOCAB)
    found = frequencies(logits, 1000, top_p=0.5)
    assert not found[LARGE_VOCAB // 2 :].any()  # of equals, the smaller ids come first
    assert (found[: LARGE_VOCAB // 2] > 0).mean() > 0.4
    found = frequencies(logits, 1000, top_k=2000)
    assert not found[2000:].any()
    assert (found[:2000] > 0).mean() > 0.3


def test_logit_bias() -> None:
    logits = random_logits(VOCAB)
    expected = logits.clone()
    expected[3] += 5
    expected[4] -= 100
    found = frequencies(logits, logit_bias=((3, 5.0), (4, -100.0)))
    assert_distribution(found, expected.softmax(0))


def test_allowed_token_ids() -> None:
    logits = random_logits(VOCAB)
    expected = torch.full_like(logits, float("-inf"))
    expected[[2, 40, 49]] = logits[[2, 40, 49]]
    found = frequencies(logits, allowed_token_ids=(49, 2, 40, 2))
    assert_distribution(found, expected.softmax(0))


def test_penalties() -> None:
    """Repetition counts prompt and output, frequency and presence the output alone."""
    logits = random_logits(VOCAB)
    prompt, output = (1, 2, 2, 3), (3, 5, 5, 5, 6)
    expected = logits.clone()
    for token_id in {1, 2, 3, 5, 6}:
        value = expected[token_id]
        expected[token_id] = value / 1.5 if value > 0 else value * 1.5
    for token_id, count in Counter(output).items():
        expected[token_id] -= 0.4 * count + 0.7
    found = frequencies(
        logits,
        prompt=prompt,
        output=output,
        repetition_penalty=1.5,
        frequency_penalty=0.4,
        presence_penalty=0.7,
    )
    assert_distribution(found, expected.softmax(0))


@pytest.mark.parametrize(
    ("output", "bad_words", "banned"),
    [
        ((), ((7,),), {7}),
        ((5, 6), ((6, 7),), {7}),
        ((5, 6), ((5, 7),), set()),
        ((5, 6), ((5, 6, 7), (6, 8), (9, 9)), {7, 8}),
        ((6,), ((5, 6, 7),), set()),  # what the prompt ends with does not begin a word
    ],
)
def test_bad_words(
    output: tuple[int, ...], bad_words: tuple[tuple[int, ...], ...], banned: set[int]
) -> None:
    logits = random_logits(VOCAB)
    expected = logits.clone()
    expected[list(banned)] = float("-inf")
    found = frequencies(logits, prompt=(1, 5), output=output, bad_words=bad_words)
    assert_distribution(found, expected.softmax(0))


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("num_output", [2, 3])
def test_min_tokens_masks_what_would_stop(ignore_eos: bool, num_output: int) -> None:
    logits = random_logits(VOCAB)
    expected = logits.clone()
    if num_output < 3:
        expected[8] = float("-inf")
        if not ignore_eos:
            expected[[0, 49]] = float("-inf")
    found = frequencies(
        logits,
        output=(9,) * num_output,
        min_tokens=3,
        eos_token_ids=(0, 49),
        stop_token_ids=(8,),
        ignore_eos=ignore_eos,
    )
    assert_distribution(found, expected.softmax(0))


# -- errors that are a request's own --------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logit_bias": ((VOCAB, 1.0),)}, "token id 50, but the vocabulary ends at 49"),
        ({"allowed_token_ids": (-1,)}, "token id -1"),
        ({"stop_token_ids": (70,)}, "token id 70"),
        ({"bad_words": ((1, 60),)}, "token id 60"),
        ({"top_p": 0.0}, "top_p in"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        (
            {"allowed_token_ids": (4,), "bad_words": ((4,),)},
            "allowed_token_ids, bad_words, logit_bias and min_tokens leave no token",
        ),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_error_ends_one_request_alone(
    params: dict[str, Any], message: str, temperature: float
) -> None:
    desk = Desk()
    logits = random_logits(3, VOCAB)
    rows = [desk.open(seed=1), desk.open(temperature=temperature, **params), desk.open(seed=2)]
    sampled = desk.sample(logits, rows)
    assert sampled.errors[1] is not None
    assert message in sampled.errors[1]
    assert [sampled.errors[0], sampled.errors[2]] == [None, None]
    assert sampled.token_id_k[0] == desk.sample_one(logits[0], rows[0])
    assert sampled.token_id_k[2] == desk.sample_one(logits[2], rows[2])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_an_error(value: float) -> None:
    desk = Desk()
    logits = random_logits(2, VOCAB)
    logits[0, 3] = value
    sampled = desk.sample(logits, [desk.open(), desk.open(top_p=0.9)])
    assert sampled.errors == ["the model gave no finite logits for this request", None]


# -- independence ---------------------------------------------------------------------------

PARAMS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**64 - 1),
        "temperature": st.sampled_from([0.0, 0.5, 1.0, 1.9]),
        "top_k": st.sampled_from([0, 1, 5, 63, 64, 900, 2999]),
        "top_p": st.sampled_from([0.3, 0.95, 0.9999, 1.0]),
        "min_p": st.sampled_from([0.0, 0.001, 0.3]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "frequency_penalty": st.sampled_from([0.0, -0.5]),
        "presence_penalty": st.sampled_from([0.0, 1.0]),
        "min_tokens": st.sampled_from([0, 5]),
        "stop_token_ids": st.sampled_from([(), (4, 5)]),
        "bad_words": st.sampled_from([(), ((1,), (2, 3))]),
        "logprobs": st.sampled_from([None, 0, 3]),
    }
)


@given(st.lists(PARAMS, min_size=2, max_size=5), st.integers(0, 2**32), st.booleans())
def test_a_row_comes_out_the_same_alone_and_with_any_mates(
    params: list[dict[str, Any]], seed: int, coarse: bool
) -> None:
    desk = Desk(LARGE_VOCAB)
    logits = random_logits(len(params), LARGE_VOCAB, seed=seed, spread=1.0)
    if coarse:  # many equal logits, as bfloat16 makes them
        logits = (logits * 4).round() / 4
    rows = [desk.open(output=(7, 8), **one) for one in params]
    together = desk.sample(logits, rows)
    for k, row in enumerate(rows):
        alone = desk.sample(logits[k : k + 1], [row])
        assert alone.token_id_k[0] == together.token_id_k[k]
        assert alone.errors[0] == together.errors[k]
        assert alone.logprobs[0] == together.logprobs[k]


def test_a_token_depends_on_its_position() -> None:
    logits = random_logits(VOCAB, spread=0.5)
    desk = Desk()
    by_length = [desk.sample_one(logits, desk.open(output=(9,) * n, seed=5)) for n in range(30)]
    again = [desk.sample_one(logits, desk.open(output=(9,) * n, seed=5)) for n in range(30)]
    assert by_length == again
    assert len(set(by_length)) > 5


# -- log probabilities ----------------------------------------------------------------------


def test_logprobs_rate_the_models_own_distribution() -> None:
    """Before bias and temperature; with the rank, and the likeliest in order."""
    desk = Desk()
    logits = random_logits(2, VOCAB)
    rows = [desk.open(logit_bias=((11, 100.0),), temperature=0.5, logprobs=4), desk.open()]
    sampled = desk.sample(logits, rows)
    reference = logits[0].double().log_softmax(0)
    entry = sampled.logprobs[0]
    assert entry is not None
    assert sampled.token_id_k[0] == 11
    assert entry.logprob == pytest.approx(float(reference[11]), abs=1e-5)
    assert entry.rank == int((logits[0] > logits[0, 11]).sum()) + 1
    best = reference.topk(4)
    assert [token_id for token_id, _ in entry.top] == best.indices.tolist()
    assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert sampled.logprobs[1] is None


def test_logprobs_0_reports_the_token_alone() -> None:
    desk = Desk()
    sampled = desk.sample(random_logits(1, VOCAB), [desk.open(logprobs=0, temperature=0.0)])
    assert sampled.logprobs[0] is not None
    assert sampled.logprobs[0].top == ()
    assert sampled.logprobs[0].rank == 1
