"""One choice of an answer: the tokens of one sequence, turned into text as they come."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain

import msgspec

from cluster.stop_texts import StopFound, StopTexts
from cluster.text import Detokenizer
from scheduler.messages import FinishReason, TokenDelta, TokenLogprobs, Usage


class Finish(StrEnum):
    """The `finish_reason` that clients see."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


_FINISH = {
    FinishReason.STOP: Finish.STOP,
    FinishReason.LENGTH: Finish.LENGTH,
    FinishReason.ABORT: Finish.ABORT,
}


@dataclass(frozen=True, slots=True)
class Piece:
    """News of one choice. Exactly one piece of a choice has `finish` or `error` set: its last.

    Tokens come at once, their text when it is certain, so the two need not belong together.
    """

    index: int
    text: str
    num_output_tokens: int
    """All so far, also those whose text is held back."""
    token_ids: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    """Per token: how many characters of output are whole before it."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Per token where the request asked for them, else empty."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """On the first piece: positions 1 to the last of the prompt, where asked for."""
    finish: Finish | None = None
    stop_reason: str | int | None = None
    """The stop text or the stop token id that ended it."""
    usage: Usage | None = None
    """On the last piece."""
    error: str | None = None


def joined(pieces: Sequence[Piece]) -> Piece:
    """All pieces of a choice as one."""
    last = pieces[-1]
    return replace(
        last,
        text="".join(piece.text for piece in pieces),
        token_ids=tuple(chain.from_iterable(piece.token_ids for piece in pieces)),
        offsets=tuple(chain.from_iterable(piece.offsets for piece in pieces)),
        logprobs=tuple(chain.from_iterable(piece.logprobs for piece in pieces)),
        prompt_logprobs=pieces[0].prompt_logprobs,
    )


@dataclass(frozen=True, slots=True)
class StopRules:
    """What ends an output, as far as its text or its last token decides."""

    texts: tuple[str, ...] = ()
    token_ids: frozenset[int] = frozenset()
    """Of the request itself; end-of-sequence is not among them and is no `stop_reason`."""
    include_in_output: bool = False
    min_tokens: int = 0


class Choice:
    """Reads the deltas of one sequence. Pure: no I/O."""

    def __init__(
        self,
        index: int,
        request_id: str,
        detokenizer: Detokenizer,
        rules: StopRules,
        *,
        is_scoring: bool = False,
    ) -> None:
        """`is_scoring`: the client wants its prompt rated and no output. The engine makes one
        token all the same, and nobody hears of it."""
        self.index = index
        self.request_id = request_id
        self._detokenizer = detokenizer
        self._rules = rules
        self._watch = StopTexts(rules.texts, include_in_output=rules.include_in_output)
        self._stopped_by: str | None = None
        self._is_scoring = is_scoring
        self._num_characters = 0
        """That came out of the detokenizer."""
        self.num_output_tokens = 0
        """Up to and with the token that completed a stop text."""

    @property
    def is_stopped(self) -> bool:
        """A stop text is complete: the engine has to be told, and what it still sends is void."""
        return self._stopped_by is not None

    def read(self, delta: TokenDelta) -> Piece:
        """What `delta` means to the client; its text may be empty."""
        if self._is_scoring:
            delta = _without_output(delta)
        text, offsets = ("", ()) if self.is_stopped else self._read_tokens(delta)
        stop_reason: str | int | None = None
        if delta.finish is not None:
            stop_reason = self._stopped_by
        if delta.finish is FinishReason.STOP and stop_reason is None and delta.token_ids:
            last_id = delta.token_ids[-1]
            stop_reason = last_id if last_id in self._rules.token_ids else None
        finish = self._finish(delta)
        has_failed = delta.finish is not None and finish is None
        return Piece(
            index=self.index,
            text=text,
            num_output_tokens=self.num_output_tokens,
            token_ids=delta.token_ids[: len(offsets)],
            offsets=offsets,
            logprobs=delta.logprobs[: len(offsets)],
            prompt_logprobs=delta.prompt_logprobs,
            finish=finish,
            stop_reason=stop_reason,
            usage=delta.usage if delta.finish is not None else None,
            error=delta.error or "the engine gave no reason" if has_failed else None,
        )

    def _read_tokens(self, delta: TokenDelta) -> tuple[str, tuple[int, ...]]:
        """The text that becomes certain, all of it if this is the end; and an offset for each
        token up to the one that ends the output."""
        text = ""
        offsets: list[int] = []
        is_end_token = delta.finish is FinishReason.STOP and not self._rules.include_in_output
        for place, token_id in enumerate(delta.token_ids, 1):
            self.num_output_tokens += 1
            offsets.append(self._num_characters)
            if is_end_token and place == len(delta.token_ids):
                break
            text += self._watched(self._detokenizer.push(token_id))
            if self.is_stopped:
                return text, tuple(offsets)
        if delta.finish is not None:
            text += self._watched(self._detokenizer.flush())
            text += "" if self.is_stopped else self._watch.flush()
        return text, tuple(offsets)

    def _watched(self, text: str) -> str:
        self._num_characters += len(text)
        if self.num_output_tokens <= self._rules.min_tokens:
            return text
        answer = self._watch.push(text)
        if isinstance(answer, StopFound):
            self._stopped_by = answer.stop
            return answer.text
        return answer

    def _finish(self, delta: TokenDelta) -> Finish | None:
        """None while it goes on, and when it failed."""
        if delta.finish is None:
            return None
        return Finish.STOP if self.is_stopped else _FINISH.get(delta.finish)


def _without_output(delta: TokenDelta) -> TokenDelta:
    finish = FinishReason.LENGTH if delta.finish is FinishReason.STOP else delta.finish
    return msgspec.structs.replace(delta, token_ids=(), logprobs=(), finish=finish)
