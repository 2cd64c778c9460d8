"""The answers of the OpenAI API: whole bodies, and the chunks of a stream.

completions   {"choices": [{"text": …}]}               chunk: the same
chat          {"choices": [{"message": {…}}]}          chunk: {"choices": [{"delta": {…}}]}
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from cluster.choice import Finish, Piece
from cluster.logprob_answers import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprobsAnswer,
    Row,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
)
from cluster.openai_api import ApiRequest, Endpoint
from cluster.prompt import Prompt
from cluster.token_words import TokenWords
from cluster.usage import UsageAnswer, UsageCount

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


class Answer(msgspec.Struct):
    """Base of all parts of an answer. None is sent as null, UNSET not at all."""


class CompletionChoice(Answer):
    index: int
    text: str
    finish_reason: Finish | None = None
    stop_reason: str | int | None = None
    logprobs: CompletionLogprobs | None = None
    prompt_logprobs: PromptLogprobsAnswer | UnsetType = UNSET
    token_ids: Sequence[int] | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET


class ChatAnswerMessage(Answer):
    content: str
    role: str = "assistant"


class ChatChoice(Answer):
    index: int
    message: ChatAnswerMessage
    finish_reason: Finish | None = None
    stop_reason: str | int | None = None
    logprobs: ChatLogprobs | None = None
    token_ids: Sequence[int] | UnsetType = UNSET


class ChatDelta(Answer):
    content: str | UnsetType = UNSET
    role: str | UnsetType = UNSET


class ChatChunkChoice(Answer):
    index: int
    delta: ChatDelta
    finish_reason: Finish | None = None
    stop_reason: str | int | None = None
    logprobs: ChatLogprobs | None = None
    token_ids: Sequence[int] | UnsetType = UNSET


AnswerChoice: TypeAlias = CompletionChoice | ChatChoice | ChatChunkChoice


class AnswerBody(Answer):
    id: str
    object: str
    created: int
    model: str
    choices: Sequence[AnswerChoice]
    usage: UsageAnswer | UnsetType = UNSET
    prompt_logprobs: PromptLogprobsAnswer | UnsetType = UNSET
    """Of a chat; a completion has them in each choice. So with the ids."""
    prompt_token_ids: Sequence[int] | UnsetType = UNSET


_encode = msgspec.json.Encoder().encode


def frame(content: Any) -> bytes:
    """One event of a stream."""
    return b"data: " + _encode(content) + b"\n\n"


def body(content: Any) -> bytes:
    return _encode(content)


@dataclass(frozen=True, slots=True)
class Shown:
    """What an answer holds beside the text that was generated."""

    echo: bool = False
    logprobs: int | None = None
    """Alternatives for each token; None: no ratings."""
    prompt_logprobs: int | None = None
    token_ids: bool = False

    @classmethod
    def of(cls, request: ApiRequest) -> "Shown":
        return cls(
            echo=request.has_echo,
            logprobs=request.num_logprobs,
            prompt_logprobs=request.prompt_logprobs,
            token_ids=bool(request.return_token_ids),
        )


class AnswerWriter:
    """Writes the answer to one request; both endpoints, streamed or not."""

    def __init__(
        self,
        endpoint: Endpoint,
        answer_id: str,
        model: str,
        created_seconds: int,
        usage: UsageCount,
        *,
        shown: Shown,
        prompts: Sequence[Prompt],
        words: TokenWords,
    ) -> None:
        """`prompts`: per choice."""
        self._endpoint = endpoint
        self._id = answer_id
        self._model = model
        self._created_seconds = created_seconds
        self._usage = usage
        self._shown = shown
        self._prompts = prompts
        self._words = words
        self._begun: set[int] = set()

    # -- whole ----------------------------------------------------------------------------

    def whole(self, pieces: Sequence[Piece]) -> bytes:
        """The body of an answer that is not streamed; one piece for each choice, in order."""
        usage = self._usage.total()
        if self._endpoint == "completions":
            choices = [self._completion_choice(piece, is_first=True) for piece in pieces]
            return body(self._body("text_completion", choices, usage))
        whole = self._body("chat.completion", [self._chat_choice(p) for p in pieces], usage)
        self._add_chat_prompt(whole, pieces[0])
        return body(whole)

    # -- in chunks ------------------------------------------------------------------------

    def chunks(self, piece: Piece, *, with_usage: bool) -> bytes:
        """The frames for one piece; none for one that brings nothing to see."""
        usage = self._usage.so_far() if with_usage else UNSET
        is_first = piece.index not in self._begun
        self._begun.add(piece.index)
        shows_tokens = self._shown.logprobs is not None or self._shown.token_ids
        has_news = bool(piece.text or (piece.token_ids and shows_tokens))
        if self._endpoint == "chat":
            return self._chat_chunks(piece, usage, is_first=is_first, has_news=has_news)
        has_news |= is_first and (self._shown.echo or self._shown.prompt_logprobs is not None)
        if not has_news and piece.finish is None:
            return b""
        choice = self._completion_choice(piece, is_first=is_first)
        return frame(self._body("text_completion", [choice], usage))

    def _chat_chunks(
        self, piece: Piece, usage: UsageAnswer | UnsetType, *, is_first: bool, has_news: bool
    ) -> bytes:
        frames = b""
        if is_first:
            role = ChatChunkChoice(piece.index, ChatDelta(content="", role="assistant"))
            beginning = self._body(self._chunk_name, [role], usage)
            if piece.index == 0:
                self._add_chat_prompt(beginning, piece)
            frames += frame(beginning)
        if has_news:
            news = ChatChunkChoice(
                piece.index,
                ChatDelta(content=piece.text),
                logprobs=self._chat_logprobs(piece),
                token_ids=self._token_ids(piece),
            )
            frames += frame(self._body(self._chunk_name, [news], usage))
        if piece.finish is not None:
            end = ChatChunkChoice(piece.index, ChatDelta(), piece.finish, piece.stop_reason)
            frames += frame(self._body(self._chunk_name, [end], usage))
        return frames

    def usage_chunk(self) -> bytes:
        """The chunk without choices that tells the usage of the whole request."""
        return frame(self._body(self._chunk_name, [], self._usage.total()))

    @property
    def _chunk_name(self) -> str:
        return "chat.completion.chunk" if self._endpoint == "chat" else "text_completion"

    def _body(
        self, name: str, choices: Sequence[AnswerChoice], usage: UsageAnswer | UnsetType
    ) -> AnswerBody:
        return AnswerBody(self._id, name, self._created_seconds, self._model, choices, usage)

    # -- parts ----------------------------------------------------------------------------

    def _completion_choice(self, piece: Piece, *, is_first: bool) -> CompletionChoice:
        shown, prompt = self._shown, self._prompts[piece.index]
        choice = CompletionChoice(
            index=piece.index,
            text=piece.text,
            finish_reason=piece.finish,
            stop_reason=piece.stop_reason,
            token_ids=self._token_ids(piece),
        )
        if is_first:
            choice.text = prompt.text + piece.text if shown.echo else piece.text
            choice.prompt_logprobs = self._prompt_logprobs(piece)
            choice.prompt_token_ids = list(prompt.token_ids) if shown.token_ids else UNSET
        if shown.logprobs is not None:
            token_ids, rows = list(piece.token_ids), list[Row](piece.logprobs)
            start = len(prompt.text) if shown.echo else 0
            offsets = [start + offset for offset in piece.offsets]
            if is_first and shown.echo:
                token_ids[:0] = prompt.token_ids
                rows[:0] = _prompt_rows(prompt, piece)
                offsets[:0] = prompt.offsets
            choice.logprobs = completion_logprobs(
                self._words, token_ids, rows, offsets, shown.logprobs
            )
        return choice

    def _chat_choice(self, piece: Piece) -> ChatChoice:
        return ChatChoice(
            index=piece.index,
            message=ChatAnswerMessage(piece.text),
            finish_reason=piece.finish,
            stop_reason=piece.stop_reason,
            logprobs=self._chat_logprobs(piece),
            token_ids=self._token_ids(piece),
        )

    def _add_chat_prompt(self, answer: AnswerBody, piece: Piece) -> None:
        """What is told of the prompt, which all choices of a chat have in common."""
        answer.prompt_logprobs = self._prompt_logprobs(piece)
        if self._shown.token_ids:
            answer.prompt_token_ids = list(self._prompts[0].token_ids)

    def _chat_logprobs(self, piece: Piece) -> ChatLogprobs | None:
        num_top = self._shown.logprobs
        if num_top is None:
            return None
        return chat_logprobs(self._words, piece.token_ids, piece.logprobs, num_top)

    def _prompt_logprobs(self, piece: Piece) -> PromptLogprobsAnswer | UnsetType:
        num_top = self._shown.prompt_logprobs
        if num_top is None:
            return UNSET
        prompt = self._prompts[piece.index]
        return prompt_logprobs(self._words, prompt.token_ids, _prompt_rows(prompt, piece), num_top)

    def _token_ids(self, piece: Piece) -> Sequence[int] | UnsetType:
        return piece.token_ids if self._shown.token_ids else UNSET


def _prompt_rows(prompt: Prompt, first_piece: Piece) -> list[Row]:
    """One for each token of the prompt; the first one has none, and none has one if the request
    ended before its prompt was computed."""
    rows: list[Row] = [None, *first_piece.prompt_logprobs]
    return rows + [None] * (len(prompt.token_ids) - len(rows))
