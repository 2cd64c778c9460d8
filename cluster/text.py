"""Text to token ids and back: the tokenizer, and detokenization while tokens arrive."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from cluster.chat_template import ChatTemplate, ChatTemplateError, find_chat_template

T = TypeVar("T")

# How many of the last tokens the text of the next one may depend on: whether a word begins with
# a space is decided by the token before it.
_CONTEXT_TOKENS = 6

# No character needs as many tokens. Beyond this the bytes are no text, and waiting for more of
# them would make every step more expensive than the one before.
_MAX_PENDING_TOKENS = 16

_REPLACEMENT = "\ufffd"


class Detokenizer:
    """The text of one output, as its tokens come; characters are given out when they are whole.

    The text does not depend on how the tokens are grouped into calls.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._given: list[int] = list(prompt_token_ids[-_CONTEXT_TOKENS:])
        """The last tokens whose text is out."""
        self._pending: list[int] = []
        self._stream, self._unfinished = self._new_stream()

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; empty while a character is incomplete."""
        self._pending.append(token_id)
        if len(self._pending) > _MAX_PENDING_TOKENS:
            return self._give_up_waiting()
        try:
            text: str | None = self._stream.step(self._tokenizer, token_id)
        except Exception:
            # The decoder changed its mind about earlier text, which is out already. tokenizers
            # has no narrower type for this.
            return self._give_up_waiting()
        if text is None:
            return ""
        self._given = (self._given + self._pending)[-_CONTEXT_TOKENS:]
        self._pending.clear()
        text, self._unfinished = text.removeprefix(self._unfinished), ""
        return text

    def flush(self) -> str:
        """What is left at the end of the output. A character that is cut off is left out."""
        return self._pending_text().rstrip(_REPLACEMENT) if self._pending else ""

    def _new_stream(self) -> tuple[DecodeStream, str]:
        """A stream that knows `_given` as context and does not give it out again.

        It would, where the context ends inside of a character: then the context's whole
        characters, the second value, have to be cut off the first text.
        """
        context = self._decode(self._given)
        is_whole = not context.endswith(_REPLACEMENT)
        stream = DecodeStream(ids=self._given, skip_special_tokens=self._skip_special_tokens)
        return stream, "" if is_whole else context.rstrip(_REPLACEMENT)

    def _give_up_waiting(self) -> str:
        text = self._pending_text()
        # Bytes that are no text would come out again with the next text, as unfinished ones.
        is_context = not text.endswith(_REPLACEMENT)
        self._given = (self._given + self._pending)[-_CONTEXT_TOKENS:] if is_context else []
        self._pending.clear()
        self._stream, self._unfinished = self._new_stream()
        return text

    def _pending_text(self) -> str:
        before = self._decode(self._given).rstrip(_REPLACEMENT)
        return self._decode(self._given + self._pending).removeprefix(before)

    def _decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
        return text


class TextCodec:
    """A model's tokenizer and chat template. Thread-safe; encoding runs in threads of its own,
    because a prompt of a megabyte takes a second."""

    def __init__(
        self, tokenizer: Tokenizer, chat_template: ChatTemplate | None, executor: Executor
    ) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._executor = executor

    @classmethod
    def load(cls, directory: Path, executor: Executor) -> "TextCodec":
        """Reads tokenizer.json and the chat template of a model directory.

        A tokenizer in an older format is converted by transformers. Raises OSError, ValueError.
        """
        settings = _read_json(directory / "tokenizer_config.json")
        source = find_chat_template(directory, settings)
        template = ChatTemplate(source, _special_tokens(settings)) if source else None
        return cls(_load_tokenizer(directory), template, executor)

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    async def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of whole prompts, with the special tokens that the model expects."""
        return await self._in_thread(self._encode, texts, True)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The token ids of a conversation; the template brings its own special tokens.

        Raises ChatTemplateError.
        """
        return await self._in_thread(self._encode_chat, messages, add_generation_prompt, variables)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def detokenizer(
        self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> Detokenizer:
        return Detokenizer(
            self._tokenizer, prompt_token_ids, skip_special_tokens=skip_special_tokens
        )

    def _encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        # Of the tokenizer's methods the batched ones let go of the interpreter lock.
        encodings = self._tokenizer.encode_batch_fast(
            list(texts), add_special_tokens=add_special_tokens
        )
        return [encoding.ids for encoding in encodings]

    def _encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None,
    ) -> list[int]:
        if self._chat_template is None:
            raise ChatTemplateError(
                "This model has no chat template, so it takes no messages: use /v1/completions."
            )
        prompt = self._chat_template.render(
            messages, add_generation_prompt=add_generation_prompt, variables=variables
        )
        return self._encode([prompt], False)[0]

    async def _in_thread(self, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(
            self._executor, function, *arguments
        )


def _load_tokenizer(directory: Path) -> Tokenizer:
    path = directory / "tokenizer.json"
    if path.is_file():
        return Tokenizer.from_file(str(path))
    from transformers import AutoTokenizer

    tokenizer: Tokenizer = AutoTokenizer.from_pretrained(directory).backend_tokenizer
    return tokenizer


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and the like; older files hold a record in the place of the text."""
    tokens = {}
    for name, value in settings.items():
        if name.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                tokens[name] = text
    return tokens


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}
