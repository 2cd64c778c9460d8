"""The answers of the OpenAI API: whole bodies, and the chunks of a stream.

completions   {"choices": [{"text": …}]}               chunk: the same
chat          {"choices": [{"message": {…}}]}          chunk: {"choices": [{"delta": {…}}]}
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from cluster.choice import Finish, Piece
from cluster.openai_api import Endpoint
from scheduler.messages import InterruptionCause, Usage

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


class Answer(msgspec.Struct):
    """Base of all parts of an answer. None is sent as null, UNSET not at all."""


class PromptTokensDetails(Answer):
    cached_tokens: int


class PreemptionUsage(Answer):
    """What interruptions did to a request, summed over its choices."""

    count: int
    causes: dict[InterruptionCause, int]
    recovered_tokens: int
    recomputed_tokens: int
    stalled_ms: float


class UsageAnswer(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    preemption: PreemptionUsage | UnsetType = UNSET


class CompletionChoice(Answer):
    index: int
    text: str
    finish_reason: Finish | None = None
    stop_reason: str | int | None = None
    logprobs: None = None


class ChatAnswerMessage(Answer):
    content: str
    role: str = "assistant"


class ChatChoice(Answer):
    index: int
    message: ChatAnswerMessage
    finish_reason: Finish | None = None
    stop_reason: str | int | None = None
    logprobs: None = None


class ChatDelta(Answer):
    content: str | UnsetType = UNSET
    role: str | UnsetType = UNSET


class ChatChunkChoice(Answer):
    index: int
    delta: ChatDelta
    finish_reason: Finish | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    logprobs: None = None


AnswerChoice: TypeAlias = CompletionChoice | ChatChoice | ChatChunkChoice


class AnswerBody(Answer):
    id: str
    object: str
    created: int
    model: str
    choices: list[AnswerChoice]
    usage: UsageAnswer | UnsetType = UNSET


_encode = msgspec.json.Encoder().encode


def frame(content: Any) -> bytes:
    """One event of a stream."""
    return b"data: " + _encode(content) + b"\n\n"


def body(content: Any) -> bytes:
    return _encode(content)


class UsageCount:
    """Usage of a request with several prompts and choices. Prompts count once."""

    def __init__(self, num_prompt_tokens: Sequence[int], num_choices_per_prompt: int) -> None:
        """`num_prompt_tokens`: per choice, those of one prompt side by side."""
        self._num_choices_per_prompt = num_choices_per_prompt
        self._prompt_tokens = sum(num_prompt_tokens[::num_choices_per_prompt])
        self._output_tokens = [0] * len(num_prompt_tokens)
        self._usages: dict[int, Usage] = {}

    def add(self, piece: Piece) -> None:
        self._output_tokens[piece.index] = piece.num_output_tokens
        if piece.usage is not None:
            self._usages[piece.index] = piece.usage

    def so_far(self) -> UsageAnswer:
        completion_tokens = sum(self._output_tokens)
        return UsageAnswer(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=self._prompt_tokens + completion_tokens,
        )

    def total(self) -> UsageAnswer:
        """When all choices have ended."""
        answer = self.so_far()
        first_choices = range(0, len(self._output_tokens), self._num_choices_per_prompt)
        answer.prompt_tokens_details = PromptTokensDetails(
            sum(self._usages[i].cached_tokens for i in first_choices if i in self._usages)
        )
        answer.preemption = self._preemption()
        return answer

    def _preemption(self) -> PreemptionUsage | UnsetType:
        interruptions = [u.interruptions for u in self._usages.values() if u.interruptions]
        if not interruptions:
            return UNSET
        causes: dict[InterruptionCause, int] = {}
        for one in interruptions:
            for cause, count in one.causes.items():
                causes[cause] = causes.get(cause, 0) + count
        return PreemptionUsage(
            count=sum(causes.values()),
            causes=causes,
            recovered_tokens=sum(one.recovered_tokens for one in interruptions),
            recomputed_tokens=sum(one.recomputed_tokens for one in interruptions),
            stalled_ms=round(sum(one.stalled_seconds for one in interruptions) * 1000, 3),
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
    ) -> None:
        self._endpoint = endpoint
        self._id = answer_id
        self._model = model
        self._created_seconds = created_seconds
        self._usage = usage
        self._begun: set[int] = set()

    # -- whole ----------------------------------------------------------------------------

    def whole(self, texts: Sequence[str], last_pieces: Sequence[Piece]) -> bytes:
        """The body of an answer that is not streamed; texts and last pieces by choice."""
        choices: list[AnswerChoice] = []
        for text, last in zip(texts, last_pieces, strict=True):
            if self._endpoint == "chat":
                message = ChatAnswerMessage(text)
                choices.append(ChatChoice(last.index, message, last.finish, last.stop_reason))
            else:
                choices.append(CompletionChoice(last.index, text, last.finish, last.stop_reason))
        name = "chat.completion" if self._endpoint == "chat" else "text_completion"
        return body(self._body(name, choices, self._usage.total()))

    # -- in chunks ------------------------------------------------------------------------

    def chunks(self, piece: Piece, *, with_usage: bool) -> bytes:
        """The frames for one piece; none for one that brings nothing to see."""
        usage = self._usage.so_far() if with_usage else UNSET
        frames = b""
        is_first = piece.index not in self._begun
        self._begun.add(piece.index)
        if self._endpoint == "chat":
            if is_first:
                delta = ChatDelta(content="", role="assistant")
                frames += self._chunk(ChatChunkChoice(piece.index, delta), usage)
            if piece.text:
                delta = ChatDelta(content=piece.text)
                frames += self._chunk(ChatChunkChoice(piece.index, delta), usage)
            if piece.finish is not None:
                end = ChatChunkChoice(piece.index, ChatDelta(), piece.finish, piece.stop_reason)
                frames += self._chunk(end, usage)
        elif piece.text or piece.finish is not None:
            choice = CompletionChoice(piece.index, piece.text, piece.finish, piece.stop_reason)
            frames = self._chunk(choice, usage)
        return frames

    def usage_chunk(self) -> bytes:
        """The chunk without choices that tells the usage of the whole request."""
        return frame(self._body(self._chunk_name, [], self._usage.total()))

    @property
    def _chunk_name(self) -> str:
        return "chat.completion.chunk" if self._endpoint == "chat" else "text_completion"

    def _chunk(self, choice: AnswerChoice, usage: UsageAnswer | UnsetType) -> bytes:
        return frame(self._body(self._chunk_name, [choice], usage))

    def _body(
        self, name: str, choices: list[AnswerChoice], usage: UsageAnswer | UnsetType
    ) -> AnswerBody:
        return AnswerBody(self._id, name, self._created_seconds, self._model, choices, usage)
