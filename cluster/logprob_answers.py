"""Ratings of tokens, in the forms of the two endpoints and of `prompt_logprobs`."""

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from msgspec import Struct

from cluster.token_words import TokenWords
from scheduler.messages import TokenLogprobs

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say."""

Row: TypeAlias = TokenLogprobs | None
"""The rating of one token; None: it has none, as the first token of a prompt."""


class CompletionLogprobs(Struct):
    """One entry per token in each list."""

    text_offset: list[int]
    """Where in the text the token begins."""
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]
    """The likeliest tokens, and in any case the token itself."""


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[ChatTokenLogprob]


class PromptTokenLogprob(Struct):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobsAnswer: TypeAlias = list[dict[str, PromptTokenLogprob] | None]
"""By token id: the likeliest tokens, and in any case the token itself."""


def completion_logprobs(
    words: TokenWords,
    token_ids: Sequence[int],
    rows: Sequence[Row],
    offsets: Sequence[int],
    num_top: int,
) -> CompletionLogprobs:
    return CompletionLogprobs(
        text_offset=list(offsets),
        token_logprobs=[None if row is None else _finite(row.logprob) for row in rows],
        tokens=[words.word(token_id) for token_id in token_ids],
        top_logprobs=[
            None if row is None else _by_word(words, token_id, row, num_top)
            for token_id, row in zip(token_ids, rows, strict=True)
        ],
    )


def chat_logprobs(
    words: TokenWords, token_ids: Sequence[int], rows: Sequence[TokenLogprobs], num_top: int
) -> ChatLogprobs:
    return ChatLogprobs(
        [
            ChatTokenLogprob(
                token=words.word(token_id),
                logprob=_finite(row.logprob),
                bytes=list(words.bytes_of(token_id)),
                top_logprobs=[
                    TopLogprob(words.word(top_id), _finite(logprob), list(words.bytes_of(top_id)))
                    for top_id, logprob in row.top[:num_top]
                ],
            )
            for token_id, row in zip(token_ids, rows, strict=True)
        ]
    )


def prompt_logprobs(
    words: TokenWords, token_ids: Sequence[int], rows: Sequence[Row], num_top: int
) -> PromptLogprobsAnswer:
    return [
        None
        if row is None
        else {
            str(rated_id): PromptTokenLogprob(_finite(logprob), rank, words.word(rated_id))
            for rated_id, logprob, rank in _rated(token_id, row, num_top)
        }
        for token_id, row in zip(token_ids, rows, strict=True)
    ]


def _by_word(
    words: TokenWords, token_id: int, row: TokenLogprobs, num_top: int
) -> dict[str, float]:
    """Two tokens may have the same text; then the likelier one, or the token itself, stands."""
    found = {words.word(token_id): _finite(row.logprob)}
    for top_id, logprob in row.top[:num_top]:
        found.setdefault(words.word(top_id), _finite(logprob))
    return found


def _rated(token_id: int, row: TokenLogprobs, num_top: int) -> Iterator[tuple[int, float, int]]:
    """Id, log probability and rank: of the token, and then of the likeliest."""
    yield token_id, row.logprob, row.rank
    for rank, (top_id, logprob) in enumerate(row.top[:num_top], 1):
        if top_id != token_id:
            yield top_id, logprob, rank


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
