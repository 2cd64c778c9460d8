"""The recorded greedy continuations are those of our decoders, token by token.

Here the whole continuation is read in one go, so that the ids can be wrong only one at a time;
that they are also reproduced step by step over the paged cache is tested with the executor.
"""

from pathlib import Path

import pytest

from tests.support.dense import logits_of
from tests.support.references import (
    MAX_PROMPT_TOKENS,
    NUM_PROMPTS,
    OUTPUT_TOKENS,
    Reference,
    smollm2_references,
    stories_directory,
    stories_references,
)
from worker.models.registry import load_decoder
from worker.pull import pull


def check(directory: Path, references: list[Reference]) -> None:
    decoder = load_decoder(directory, dtype="float32")
    for reference in references:
        prompt, output = reference.prompt_token_ids, reference.output_token_ids
        logits_tV = logits_of([decoder], [{0: [*prompt, *output[:-1]]}])[0]
        assert logits_tV[len(prompt) - 1 :].argmax(-1).tolist() == output, reference.source


def test_recording_is_as_described() -> None:
    references = smollm2_references()
    assert len(references) == len({reference.source for reference in references}) == NUM_PROMPTS
    for reference in references:
        assert len(reference.output_token_ids) == OUTPUT_TOKENS
        assert 0 < len(reference.prompt_token_ids) <= MAX_PROMPT_TOKENS


def test_stories260k_repeats_the_references(test_data_dir: Path | None, tmp_path: Path) -> None:
    directory = stories_directory(test_data_dir, tmp_path)
    check(directory, stories_references(directory, test_data_dir))


@pytest.mark.full
def test_stand_in_for_stories260k_repeats_its_own_references(tmp_path: Path) -> None:
    """What takes the place of stories260K where there is no test data."""
    directory = stories_directory(None, tmp_path)
    check(directory, stories_references(directory, None)[:3])


def test_smollm2_repeats_the_first_references() -> None:
    check(pull("smollm2-135m"), smollm2_references()[:4])


@pytest.mark.full
def test_smollm2_repeats_the_references() -> None:
    check(pull("smollm2-135m"), smollm2_references())
