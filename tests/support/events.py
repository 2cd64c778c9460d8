"""Reading streams of server-sent events the way a strict client does."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

PROMPT_FIELDS = ("prompt_logprobs", "prompt_token_ids")


@dataclass(slots=True)
class Stream:
    """What came, and in which order. Raises AssertionError for anything that may not come."""

    chunks: list[dict[str, Any]] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)
    finishes: dict[int, str] = field(default_factory=dict)
    stop_reasons: dict[int, Any] = field(default_factory=dict)
    logprobs: dict[int, dict[str, list[Any]]] = field(default_factory=dict)
    """Per choice, the lists of all chunks joined."""
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    prompts: dict[int, dict[str, Any]] = field(default_factory=dict)
    """What was told of the prompt: per choice, or of a chat under 0."""
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
        self._take_prompt(0, chunk)

    def _take_prompt(self, index: int, part: dict[str, Any]) -> None:
        """Once at most, and with the first chunk of a choice."""
        found = {name: part[name] for name in PROMPT_FIELDS if name in part}
        if found:
            assert index not in self.prompts, "the prompt comes twice"
            self.prompts[index] = found

    def _take_choice(self, choice: dict[str, Any]) -> None:
        index = choice["index"]
        assert index not in self.finishes, f"choice {index} goes on after its end"
        text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
        if "delta" in choice:
            is_first = index not in self.texts
            assert choice["delta"].get("role") == ("assistant" if is_first else None)
            has_news = text or choice["finish_reason"] or choice.get("token_ids")
            assert is_first or has_news or choice["logprobs"], "a chunk without anything"
        self._take_prompt(index, choice)
        if "token_ids" in choice:
            self.token_ids.setdefault(index, []).extend(choice["token_ids"])
        for name, entries in (choice["logprobs"] or {}).items():
            self.logprobs.setdefault(index, {}).setdefault(name, []).extend(entries)
        self.texts[index] = self.texts.get(index, "") + text
        if index == 0 and text:
            self.pieces.append(text)
        if choice["finish_reason"] is not None:
            self.finishes[index] = choice["finish_reason"]
            self.stop_reasons[index] = choice["stop_reason"]

    def assert_same_as(self, answer: dict[str, Any]) -> None:
        """The chunks joined are the answer that is not streamed."""
        choices = {choice["index"]: choice for choice in answer["choices"]}
        assert self.texts == {
            index: choice["text"] if "text" in choice else choice["message"]["content"]
            for index, choice in choices.items()
        }
        assert self.finishes == {i: choice["finish_reason"] for i, choice in choices.items()}
        assert self.stop_reasons == {i: choice["stop_reason"] for i, choice in choices.items()}
        assert self.logprobs == {
            index: choice["logprobs"] for index, choice in choices.items() if choice["logprobs"]
        }
        assert self.token_ids == {
            index: choice["token_ids"] for index, choice in choices.items() if "token_ids" in choice
        }
        told = {**choices, 0: {**choices[0], **answer}}
        prompts = {
            index: {name: part[name] for name in PROMPT_FIELDS if name in part}
            for index, part in told.items()
        }
        assert self.prompts == {index: part for index, part in prompts.items() if part}
        if self.usage is not None:
            assert without_cache(self.usage) == without_cache(answer["usage"])


def without_cache(usage: dict[str, Any]) -> dict[str, Any]:
    """The second of two equal requests finds the first one's blocks."""
    return {name: value for name, value in usage.items() if name != "prompt_tokens_details"}
