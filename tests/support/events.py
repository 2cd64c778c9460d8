"""Reading streams of server-sent events the way a strict client does."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Stream:
    """What came, and in which order. Raises AssertionError for anything that may not come."""

    chunks: list[dict[str, Any]] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)
    finishes: dict[int, str] = field(default_factory=dict)
    stop_reasons: dict[int, Any] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    running_usages: list[dict[str, Any]] = field(default_factory=list)
    error: dict[str, Any] | None = None
    num_comments: int = 0
    pieces: list[str] = field(default_factory=list)
    """Of choice 0, one for each chunk with text."""
    is_done: bool = False

    def read(self, lines: Iterable[str]) -> "Stream":
        """Read a stream to its end, line by line without line ends."""
        after_event = True
        for line in lines:
            if not line:
                after_event = True
                continue
            assert after_event, f"an empty line is missing before {line[:80]}"
            after_event = False
            if line.startswith(":"):
                self.num_comments += 1
                continue
            assert line.startswith("data: "), line
            assert not self.is_done, "something comes after [DONE]"
            content = line.removeprefix("data: ")
            if content == "[DONE]":
                self.is_done = True
            else:
                self._take(json.loads(content))
        assert self.is_done, "the stream ends without [DONE]"
        return self

    def _take(self, chunk: dict[str, Any]) -> None:
        assert self.error is None, "something comes after an error"
        if "error" in chunk:
            self.error = chunk["error"]
            return
        self.chunks.append(chunk)
        assert self.usage is None, "something comes after the usage of the whole request"
        usage = chunk.get("usage")
        if not chunk["choices"]:
            self.usage = usage
        elif usage is not None:
            self.running_usages.append(usage)
        for choice in chunk["choices"]:
            self._take_choice(choice)

    def _take_choice(self, choice: dict[str, Any]) -> None:
        index = choice["index"]
        assert index not in self.finishes, f"choice {index} goes on after its end"
        text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
        if "delta" in choice:
            is_first = index not in self.texts
            assert choice["delta"].get("role") == ("assistant" if is_first else None)
            assert is_first or text or choice["finish_reason"], "a chunk without anything"
        self.texts[index] = self.texts.get(index, "") + text
        if index == 0 and text:
            self.pieces.append(text)
        if choice["finish_reason"] is not None:
            self.finishes[index] = choice["finish_reason"]
            self.stop_reasons[index] = choice["stop_reason"]
