"""Logits of our decoders against those of transformers' own modeling code, in float32."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.support.dense import logits_of
from tests.support.models import (
    NATIVE,
    THROUGH_TRANSFORMERS,
    VOCAB_SIZE,
    make_model,
    quiet_transformers,
)
from tests.support.references import stories_directory
from tests.support.thread_group import run_ranks
from worker.models.llama import LlamaDecoder
from worker.models.registry import load_decoder
from worker.models.transformers_decoder import TransformersDecoder
from worker.pull import pull

TOLERANCE = 1e-4
"""Of the largest logit of each row."""


def random_prompts(vocab_size: int, *lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in lengths]


def mixed_steps(first: list[int], second: list[int]) -> list[dict[int, list[int]]]:
    """Two sequences in chunks of uneven sizes: alone, together, and one token at a time."""
    return [
        {0: first[:23]},
        {1: second[:11], 0: first[23:24]},
        {0: first[24:], 1: second[11:18]},
        *({1: [token_id]} for token_id in second[18:]),
    ]


def transformers_logits(directory: Path, prompts: list[list[int]]) -> list[Tensor]:
    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        )
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).logits[0] for prompt in prompts]


def assert_close(ours_tV: Tensor, theirs_tV: Tensor) -> None:
    assert ours_tV.dtype == torch.float32
    assert ours_tV.shape == theirs_tV.shape
    difference_t = (ours_tV - theirs_tV).abs().amax(1) / theirs_tV.abs().amax(1)
    assert difference_t.max() <= TOLERANCE


def check(directory: Path, vocab_size: int, kind: type[Any]) -> None:
    first, second = random_prompts(vocab_size, 50, 22)
    decoder = load_decoder(directory, dtype="float32")
    assert isinstance(decoder, kind)
    ours = logits_of([decoder], mixed_steps(first, second))
    for seq, theirs_tV in enumerate(transformers_logits(directory, [first, second])):
        assert_close(ours[seq], theirs_tV)


@pytest.mark.parametrize("name", NATIVE)
def test_native_decoder_has_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    check(make_model(name, tmp_path), VOCAB_SIZE, LlamaDecoder)


@pytest.mark.parametrize("name", THROUGH_TRANSFORMERS)
def test_transformers_code_keeps_its_logits_over_our_attention(name: str, tmp_path: Path) -> None:
    check(make_model(name, tmp_path), VOCAB_SIZE, TransformersDecoder)


def test_stories260k_has_the_logits_of_transformers(
    test_data_dir: Path | None, tmp_path: Path
) -> None:
    check(stories_directory(test_data_dir, tmp_path), 512, LlamaDecoder)


def test_smollm2_has_the_logits_of_transformers() -> None:
    check(pull("smollm2-135m"), 49152, LlamaDecoder)


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("llama-biases-tied", 2),
        ("llama-biases-tied", 4),  # two KV heads, so each is held twice
        ("qwen2", 2),
        ("qwen3", 4),
        ("mistral-window", 2),
    ],
)
def test_ranks_and_stages_together_are_the_whole_model(
    name: str, ranks: int, stages: int, tmp_path: Path
) -> None:
    directory = make_model(name, tmp_path)
    first, second = random_prompts(VOCAB_SIZE, 50, 22)
    steps = mixed_steps(first, second)

    def run(comm: Any) -> tuple[dict[int, Tensor], int]:
        decoders = [
            load_decoder(directory, dtype="float32", comm=comm, stage=stage, num_stages=stages)
            for stage in range(stages)
        ]
        return logits_of(decoders, steps), sum(d.spec.weight_bytes for d in decoders)

    results = run_ranks(ranks, run)
    for seq, theirs_tV in enumerate(transformers_logits(directory, [first, second])):
        for ours, _ in results:
            assert_close(ours[seq], theirs_tV)


def test_the_longest_window_is_seen_and_no_more(tmp_path: Path) -> None:
    """A token changes what the w positions from it on say, and nothing after them (1 layer)."""
    decoder = load_decoder(make_model("mistral-window-one-layer", tmp_path), dtype="float32")
    (prompt,) = random_prompts(VOCAB_SIZE, 40)
    changed = [*prompt[:10], (prompt[10] + 1) % VOCAB_SIZE, *prompt[11:]]
    before, after = (logits_of([decoder], [{0: ids}])[0] for ids in (prompt, changed))
    differs_t = (before != after).any(1)
    assert differs_t.nonzero().flatten().tolist() == list(range(10, 10 + 7))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_near_float32(dtype: str, tmp_path: Path) -> None:
    directory = make_model("qwen2", tmp_path)
    (prompt,) = random_prompts(VOCAB_SIZE, 40)
    exact, rough = (
        logits_of([load_decoder(directory, dtype=kind)], [{0: prompt}])[0]
        for kind in ("float32", dtype)
    )
    difference_t = (exact - rough).abs().amax(1) / exact.abs().amax(1)
    assert difference_t.median() <= 0.05
