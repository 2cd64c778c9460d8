"""Finding stop texts in text that arrives in pieces, holding back as little as possible.

given out already        buffer
─────────────────|──────────────────────|
                 |  free    |  held     |   held: the longest end of the text that some
                                            stop text begins with
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopFound:
    stop: str
    """The stop text that was completed first."""
    text: str
    """What is to be given out before the end: never a part of the stop text unless wanted."""


class _Automaton:
    """How much of one stop text the text read so far ends with (Knuth, Morris and Pratt).

    The failure table grows with the match, so a long stop text costs nothing until it appears.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._failure = [0]

    def feed(self, character: str) -> bool:
        """Read one character; True when it completes the stop text."""
        self.matched = self._advance(self.matched, character)
        if self.matched == len(self.stop):
            return True
        if self.matched > len(self._failure):
            self._failure.append(self._advance(self._failure[-1], character))
        return False

    def _advance(self, matched: int, character: str) -> int:
        stop, failure = self.stop, self._failure
        while matched and stop[matched] != character:
            matched = failure[matched - 1]
        return matched + (stop[matched] == character)


class StopTexts:
    """Watches one output for its stop texts.

    The result does not depend on how the text is cut into pieces: the stop text that is complete
    first wins, and of two that are complete at the same character the longer one.
    """

    def __init__(self, stops: Sequence[str], *, include_in_output: bool = False) -> None:
        self._automata = [_Automaton(stop) for stop in sorted(stops, key=len, reverse=True)]
        self._include_in_output = include_in_output
        self._buffer = ""

    def push(self, text: str) -> str | StopFound:
        """What may be given out after `text` has come, or the stop text that it completes.

        Nothing may be pushed after a stop text was found.
        """
        if not self._automata:
            return text
        start = len(self._buffer)
        self._buffer += text
        for end, character in enumerate(text, start + 1):
            completed = [a.stop for a in self._automata if a.feed(character)]
            if completed:
                return self._found(completed[0], end)
        held = max(automaton.matched for automaton in self._automata)
        free = len(self._buffer) - held
        text, self._buffer = self._buffer[:free], self._buffer[free:]
        return text

    def flush(self) -> str:
        """What was held back, at the end of the output."""
        text, self._buffer = self._buffer, ""
        return text

    def _found(self, stop: str, end: int) -> StopFound:
        cut = end if self._include_in_output else end - len(stop)
        return StopFound(stop, self._buffer[:cut])
