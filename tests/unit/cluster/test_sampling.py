"""From a request to what the sampler is told."""

import json
from pathlib import Path

import pytest

from cluster.api_errors import InvalidRequestError
from cluster.openai_api import ChatCompletionRequest, CompletionRequest
from cluster.sampling import (
    ModelLimits,
    SamplingDefaults,
    SeedSource,
    sampling_params,
    seed_of_choice,
)
from scheduler.messages import SamplingParams

LIMITS = ModelLimits(vocab_size=1000, max_model_len=100)


def params(fields: dict[str, object], defaults: SamplingDefaults | None = None) -> SamplingParams:
    request = CompletionRequest.model_validate({"prompt": "x", **fields})
    return sampling_params(
        request,
        defaults=defaults or SamplingDefaults(),
        limits=LIMITS,
        num_prompt_tokens=10,
        seed=7,
    )


def test_a_request_that_says_nothing() -> None:
    assert params({}) == SamplingParams(max_tokens=16, seed=7)


def test_null_is_the_same_as_nothing() -> None:
    names = [name for name in CompletionRequest.model_fields if name != "prompt"]
    assert params(dict.fromkeys(names)) == SamplingParams(max_tokens=16, seed=7)


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        ({"temperature": 0}, "temperature", 0.0),
        ({"top_p": 0.5}, "top_p", 0.5),
        ({"top_k": 5}, "top_k", 5),
        ({"top_k": -1}, "top_k", 0),
        ({"top_k": 10**30}, "top_k", 1000),
        ({"min_p": 0.1}, "min_p", 0.1),
        ({"repetition_penalty": 1.2}, "repetition_penalty", 1.2),
        ({"presence_penalty": -1}, "presence_penalty", -1.0),
        ({"frequency_penalty": 2}, "frequency_penalty", 2.0),
        ({"logit_bias": {"5": -100, "999": 3.5}}, "logit_bias", ((5, -100.0), (999, 3.5))),
        ({"stop_token_ids": [0, 999]}, "stop_token_ids", (0, 999)),
        ({"allowed_token_ids": [3]}, "allowed_token_ids", (3,)),
        ({"ignore_eos": True}, "ignore_eos", True),
        ({"min_tokens": 5}, "min_tokens", 5),
        ({"max_tokens": 100}, "max_tokens", 100),
    ],
)
def test_each_field_arrives(given: dict[str, object], field: str, value: object) -> None:
    assert getattr(params(given), field) == value


def test_a_chat_may_use_the_whole_context() -> None:
    body = {"messages": [{"role": "user", "content": "x"}]}
    request = ChatCompletionRequest.model_validate(body)
    chat = sampling_params(
        request, defaults=SamplingDefaults(), limits=LIMITS, num_prompt_tokens=10, seed=0
    )
    assert chat.max_tokens == 90


def test_the_newer_name_of_max_tokens_counts() -> None:
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 5,
        "max_completion_tokens": 6,
    }
    request = ChatCompletionRequest.model_validate(body)
    chat = sampling_params(
        request, defaults=SamplingDefaults(), limits=LIMITS, num_prompt_tokens=10, seed=0
    )
    assert chat.max_tokens == 6


def test_the_models_own_choices_hold_where_the_request_has_none(tmp_path: Path) -> None:
    generation = {"eos_token_id": [5, 6], "temperature": 0.6, "top_k": 20, "top_p": 0.9}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 4}))
    defaults = SamplingDefaults.read(tmp_path)
    assert defaults == SamplingDefaults((5, 6), temperature=0.6, top_k=20, top_p=0.9)
    mixed = params({"temperature": 1.0}, defaults)
    assert (mixed.temperature, mixed.top_k, mixed.eos_token_ids) == (1.0, 20, (5, 6))


def test_the_end_of_sequence_may_stand_in_the_model_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 4}))
    assert SamplingDefaults.read(tmp_path).eos_token_ids == (4,)


def test_seeds_are_of_64_bits_whatever_was_given() -> None:
    for seed in (-1, 2**64 - 1, 0, -(2**63)):
        assert 0 <= seed_of_choice(seed, 0) < 2**64
    assert seed_of_choice(-1, 0) == 2**64 - 1


def test_choices_have_seeds_of_their_own_and_the_first_has_the_requests() -> None:
    seeds = [seed_of_choice(42, choice) for choice in range(128)]
    assert seeds[0] == 42
    assert len(set(seeds)) == 128
    assert seeds == [seed_of_choice(42, choice) for choice in range(128)]


def test_drawn_seeds_repeat_only_if_asked_to() -> None:
    assert SeedSource(1).draw() == SeedSource(1).draw()
    assert SeedSource().draw() != SeedSource().draw()


@pytest.mark.parametrize(
    ("fields", "is_possible"),
    [
        ({"allowed_token_ids": [2]}, True),
        ({"allowed_token_ids": [2], "min_tokens": 3}, False),
        ({"allowed_token_ids": [2], "min_tokens": 3, "ignore_eos": True}, True),
        ({"allowed_token_ids": [2, 4], "min_tokens": 3, "stop_token_ids": [4]}, False),
        ({"allowed_token_ids": [2, 4], "min_tokens": 3}, True),
    ],
)
def test_something_must_be_left_to_sample(fields: dict[str, object], is_possible: bool) -> None:
    defaults = SamplingDefaults(eos_token_ids=(2,))
    if is_possible:
        params(fields, defaults)
        return
    with pytest.raises(InvalidRequestError, match="allow another one") as raised:
        params(fields, defaults)
    assert raised.value.param == "allowed_token_ids"
