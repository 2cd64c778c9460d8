"""Whole texts over the paged cache, from models that run through transformers' code.

The native decoder's texts are tested with the executor and with groups of ranks.
"""

from pathlib import Path

import pytest

from tests.support.models import MAX_POSITION, THROUGH_TRANSFORMERS, VOCAB_SIZE, make_model
from tests.support.real_worker import LocalWorker, complete, worker_config
from tests.support.references import random_prompts, references_by_transformers

COVERING = {"gpt2", "gemma2", "mixtral"}
# Longer than its trained length, longrope's texts depend on how long they get.
NAMES = [
    name if name in COVERING else pytest.param(name, marks=pytest.mark.full)
    for name in THROUGH_TRANSFORMERS
    if name != "phi3-longrope"
]


@pytest.mark.parametrize("name", NAMES)
def test_greedy_text_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    """With chunks off the block edges, and a pool so small that requests preempt each other."""
    directory = make_model(name, tmp_path)
    references = references_by_transformers(
        directory, random_prompts(VOCAB_SIZE), count=4, ends_early=True
    )
    config = worker_config(
        block_size=8,
        num_blocks=30,
        max_model_len=MAX_POSITION,
        max_num_seqs=4,
        max_num_batched_tokens=13,
    )
    answers = complete(
        config,
        LocalWorker(config, directory),
        [reference.prompt_token_ids for reference in references],
    )
    for reference, answer in zip(references, answers, strict=True):
        assert answer.token_ids == reference.output_token_ids
    assert any(answer.usage and answer.usage.interruptions for answer in answers)
