"""One choice of an answer: the tokens of one sequence, turned into text as they come."""

from dataclasses import dataclass
from enum import StrEnum

from cluster.stop_texts import StopFound, StopTexts
from cluster.text import Detokenizer
from scheduler.messages import FinishReason, TokenDelta, Usage


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
    """News of one choice. Exactly one piece of a choice has `finish` or `error` set: its last."""

    index: int
    text: str
    num_output_tokens: int
    """All so far, also those whose text is held back."""
    finish: Finish | None = None
    stop_reason: str | int | None = None
    """The stop text or the stop token id that ended it."""
    usage: Usage | None = None
    """On the last piece."""
    error: str | None = None


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
        self, index: int, request_id: str, detokenizer: Detokenizer, rules: StopRules
    ) -> None:
        self.index = index
        self.request_id = request_id
        self._detokenizer = detokenizer
        self._rules = rules
        self._watch = StopTexts(rules.texts, include_in_output=rules.include_in_output)
        self._stopped_by: str | None = None
        self.num_output_tokens = 0
        """Up to and with the token that completed a stop text."""

    @property
    def is_stopped(self) -> bool:
        """A stop text is complete: the engine has to be told, and what it still sends is void."""
        return self._stopped_by is not None

    def read(self, delta: TokenDelta) -> Piece:
        """What `delta` means to the client; its text may be empty."""
        text = "" if self.is_stopped else self._read_tokens(delta)
        if delta.finish is None:
            return Piece(self.index, text, self.num_output_tokens)
        stop_reason: str | int | None = self._stopped_by
        if delta.finish is FinishReason.STOP and stop_reason is None and delta.token_ids:
            last_id = delta.token_ids[-1]
            stop_reason = last_id if last_id in self._rules.token_ids else None
        return self._last(delta, text, stop_reason)

    def _read_tokens(self, delta: TokenDelta) -> str:
        """The text that becomes certain; all of it if this is the end."""
        text = ""
        is_end_token = delta.finish is FinishReason.STOP and not self._rules.include_in_output
        for place, token_id in enumerate(delta.token_ids, 1):
            self.num_output_tokens += 1
            if is_end_token and place == len(delta.token_ids):
                break
            text += self._watched(self._detokenizer.push(token_id))
            if self.is_stopped:
                return text
        if delta.finish is not None:
            text += self._watched(self._detokenizer.flush())
            text += "" if self.is_stopped else self._watch.flush()
        return text

    def _watched(self, text: str) -> str:
        if self.num_output_tokens <= self._rules.min_tokens:
            return text
        answer = self._watch.push(text)
        if isinstance(answer, StopFound):
            self._stopped_by = answer.stop
            return answer.text
        return answer

    def _last(self, delta: TokenDelta, text: str, stop_reason: str | int | None) -> Piece:
        finish = Finish.STOP if self.is_stopped else _FINISH.get(delta.finish or FinishReason.ERROR)
        return Piece(
            index=self.index,
            text=text,
            num_output_tokens=self.num_output_tokens,
            finish=finish,
            stop_reason=stop_reason,
            usage=delta.usage,
            error=None if finish else delta.error or "the engine gave no reason",
        )
