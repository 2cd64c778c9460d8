"""From a request's sampling fields to `SamplingParams`, with the checks that need the model."""

import json
import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

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

TokenSequences: TypeAlias = tuple[tuple[int, ...], ...]


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
    max_tokens: int | None = None
    """For chats; None: as many as fit."""

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
        max_tokens = generation.get("max_new_tokens")
        if isinstance(max_tokens, int) and max_tokens > 0:
            given["max_tokens"] = max_tokens
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
    if request.truncate_prompt_tokens == 0:
        raise InvalidRequestError(
            "truncate_prompt_tokens must be at least 1, or -1 for as many as fit, not 0.",
            param="truncate_prompt_tokens",
        )
    if isinstance(request, ChatCompletionRequest):
        _check_chat(request)
    elif request.max_tokens == 0 and not request.has_echo:
        raise InvalidRequestError(
            "max_tokens must be at least 1, not 0; 0 goes with echo only, to rate the prompt.",
            param="max_tokens",
        )


def _check_chat(request: ChatCompletionRequest) -> None:
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequestError(
            f"top_logprobs is {request.top_logprobs}, which goes with logprobs: true only.",
            param="top_logprobs",
        )
    if request.echo:
        raise InvalidRequestError("echo goes with completions only, not with chats.", param="echo")


def sampling_params(
    request: ApiRequest,
    *,
    defaults: SamplingDefaults,
    limits: ModelLimits,
    num_prompt_tokens: int,
    seed: int,
    bad_words: TokenSequences = (),
) -> SamplingParams:
    """Raises InvalidRequestError, naming the limit, for what this model cannot do.

    `bad_words`: those of the request in tokens (see `bad_word_spellings`).
    """
    max_tokens = _max_tokens(request, defaults, limits, num_prompt_tokens)
    params = SamplingParams(
        # Scoring takes one step like the shortest output; its token is dropped.
        max_tokens=max(1, max_tokens),
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
        bad_words=bad_words,
        eos_token_ids=defaults.eos_token_ids,
        stop_token_ids=_checked_ids(request, "stop_token_ids", limits.vocab_size),
        ignore_eos=bool(request.ignore_eos),
        logprobs=request.num_logprobs,
        prompt_logprobs=request.num_prompt_logprobs,
    )
    _check_a_token_is_left(params)
    return params


def _check_a_token_is_left(params: SamplingParams) -> None:
    """Raises InvalidRequestError if nothing could be sampled, which else fails in the worker."""
    if not params.allowed_token_ids:
        return
    left = set(params.allowed_token_ids)
    left.difference_update(word[0] for word in params.bad_words if len(word) == 1)
    if params.min_tokens:
        left.difference_update(params.stop_token_ids)
        if not params.ignore_eos:
            left.difference_update(params.eos_token_ids)
    if not left:
        raise InvalidRequestError(
            f"allowed_token_ids names {len(params.allowed_token_ids)} tokens, and bad_words and"
            " min_tokens exclude all of them: allow another one.",
            param="allowed_token_ids",
        )


def room_for_prompt(request: ApiRequest, limits: ModelLimits) -> int:
    """The most prompt tokens that leave the output the room that the request asks for."""
    _, max_tokens = _asked_max_tokens(request)
    if max_tokens is None:
        max_tokens = _COMPLETION_MAX_TOKENS if isinstance(request, CompletionRequest) else 1
    return max(1, limits.max_model_len - max(1, max_tokens))


def bad_word_spellings(words: Sequence[str]) -> list[str]:
    """How each word may stand in a text: at its beginning, and behind a space."""
    return [spelling for word in words for spelling in (word.lstrip(" "), f" {word.lstrip(' ')}")]


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


def _max_tokens(
    request: ApiRequest, defaults: SamplingDefaults, limits: ModelLimits, num_prompt_tokens: int
) -> int:
    """As asked for, else what the endpoint gives. That prompt and output together may be too
    long is no error: the scheduler cuts the output."""
    name, max_tokens = _asked_max_tokens(request)
    if max_tokens is None:
        room = max(1, limits.max_model_len - num_prompt_tokens)
        if isinstance(request, CompletionRequest):
            return min(_COMPLETION_MAX_TOKENS, room)
        return min(defaults.max_tokens or room, room)
    if max_tokens > limits.max_model_len:
        raise InvalidRequestError(
            f"{name} is {max_tokens}, but the maximum context length of this model is"
            f" {limits.max_model_len} tokens, prompt and output together.",
            param=name,
            code="context_length_exceeded",
        )
    return max_tokens


def _asked_max_tokens(request: ApiRequest) -> tuple[str, int | None]:
    """The field that counts, and its value."""
    if isinstance(request, ChatCompletionRequest) and request.max_completion_tokens is not None:
        return "max_completion_tokens", request.max_completion_tokens
    return "max_tokens", request.max_tokens


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
