"""From a request's sampling fields to `SamplingParams`, with the checks that need the model."""

import json
import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from cluster.api_errors import InvalidRequestError
from cluster.openai_api import (
    NEUTRAL_VALUES,
    ApiRequest,
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
)
from scheduler.messages import SamplingParams

# What the OpenAI API takes for a completion that names no max_tokens; a chat has no such limit.
_COMPLETION_MAX_TOKENS = 16

_UINT64 = 1 << 64


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the running engine can do."""

    vocab_size: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a model's authors chose for requests that say nothing."""

    eos_token_ids: tuple[int, ...] = ()
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def read(cls, directory: Path) -> "SamplingDefaults":
        """From generation_config.json, and config.json for its end-of-sequence ids."""
        generation = _read_json(directory / "generation_config.json")
        eos = generation.get("eos_token_id")
        if eos is None:
            eos = _read_json(directory / "config.json").get("eos_token_id")
        given = {
            name: generation[name]
            for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
            if isinstance(generation.get(name), int | float)
        }
        eos_token_ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
        return cls(eos_token_ids=tuple(eos_token_ids), **given)


class SeedSource:
    """Seeds of 64 bits for requests that bring none."""

    def __init__(self, seed: int | None = None) -> None:
        """None: from the operating system, so that no two servers draw the same."""
        self._random = random.SystemRandom() if seed is None else random.Random(seed)

    def draw(self) -> int:
        return self._random.getrandbits(64)


def seed_of_choice(seed: int, choice: int) -> int:
    """Choice 0 has the request's own seed, so that `n` does not change what it says."""
    seed %= _UINT64
    return xxhash.xxh3_64_intdigest(struct.pack("<QQ", seed, choice)) if choice else seed


def check_supported(request: ApiRequest) -> None:
    """Raises InvalidRequestError for a field that would change the answer and is not built.

    Ignoring it would be a lie.
    """
    for name, neutral in NEUTRAL_VALUES.items():
        value = getattr(request, name, None)
        if value is not None and not any(value == n and type(value) is type(n) for n in neutral):
            raise InvalidRequestError(
                f"{name} is not supported yet: leave it out.", param=name, code="not_supported"
            )
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError(
            "stream_options go with stream: true only.", param="stream_options"
        )


def sampling_params(
    request: ApiRequest,
    *,
    defaults: SamplingDefaults,
    limits: ModelLimits,
    num_prompt_tokens: int,
    seed: int,
) -> SamplingParams:
    """Raises InvalidRequestError, naming the limit, for what this model cannot do."""
    max_tokens = _max_tokens(request, limits, num_prompt_tokens)
    return SamplingParams(
        max_tokens=max_tokens,
        seed=seed % _UINT64,
        min_tokens=_min_tokens(request, max_tokens),
        temperature=_given(request.temperature, defaults.temperature),
        top_k=min(max(0, _given(request.top_k, defaults.top_k)), limits.vocab_size),
        top_p=_given(request.top_p, defaults.top_p),
        min_p=_given(request.min_p, defaults.min_p),
        repetition_penalty=_given(request.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        logit_bias=_logit_bias(request, limits.vocab_size),
        allowed_token_ids=_checked_ids(request, "allowed_token_ids", limits.vocab_size),
        eos_token_ids=defaults.eos_token_ids,
        stop_token_ids=_checked_ids(request, "stop_token_ids", limits.vocab_size),
        ignore_eos=bool(request.ignore_eos),
    )


def with_seed(params: SamplingParams, seed: int) -> SamplingParams:
    return msgspec.structs.replace(params, seed=seed)


def check_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raises InvalidRequestError if the model has no token for one of the ids."""
    if not token_ids:
        return
    for token_id in (min(token_ids), max(token_ids)):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"{param} holds the token id {token_id}; those of this model are 0 to"
                f" {vocab_size - 1}.",
                param=param,
            )


def _given(value: Any, default: Any) -> Any:
    return default if value is None else value


def _max_tokens(request: ApiRequest, limits: ModelLimits, num_prompt_tokens: int) -> int:
    """As asked for, else what the endpoint gives. That prompt and output together may be too
    long is no error: the scheduler cuts the output."""
    name, max_tokens = "max_tokens", request.max_tokens
    if isinstance(request, ChatCompletionRequest) and request.max_completion_tokens is not None:
        name, max_tokens = "max_completion_tokens", request.max_completion_tokens
    if max_tokens is None:
        room = max(1, limits.max_model_len - num_prompt_tokens)
        is_completion = isinstance(request, CompletionRequest)
        return min(_COMPLETION_MAX_TOKENS, room) if is_completion else room
    if max_tokens > limits.max_model_len:
        raise InvalidRequestError(
            f"{name} is {max_tokens}, but the maximum context length of this model is"
            f" {limits.max_model_len} tokens, prompt and output together.",
            param=name,
            code="context_length_exceeded",
        )
    return max_tokens


def _min_tokens(request: GenerationRequest, max_tokens: int) -> int:
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidRequestError(
            f"min_tokens must be at most max_tokens, which is {max_tokens}, not {min_tokens}.",
            param="min_tokens",
        )
    return min_tokens


def _logit_bias(request: GenerationRequest, vocab_size: int) -> tuple[tuple[int, float], ...]:
    biases = []
    for key, bias in (request.logit_bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise InvalidRequestError(
                "logit_bias maps token ids to numbers, and one of its keys is no token id.",
                param="logit_bias",
            )
        biases.append((int(key), bias))
    check_token_ids([token_id for token_id, _ in biases], vocab_size, "logit_bias")
    return tuple(biases)


def _checked_ids(request: GenerationRequest, name: str, vocab_size: int) -> tuple[int, ...]:
    token_ids: list[int] = getattr(request, name) or []
    check_token_ids(token_ids, vocab_size, name)
    return tuple(token_ids)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}
