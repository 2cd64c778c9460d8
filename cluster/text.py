"""Text to token ids and back: the tokenizer, and detokenization while tokens arrive."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from cluster.chat_template import (
    ChatTemplate,
    ChatTemplateError,
    Conversation,
    find_chat_template,
)
from cluster.prompt import Prompt
from cluster.token_words import TokenWords

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
        _keep_no_prompts(tokenizer)
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._executor = executor
        self.words = TokenWords(tokenizer)

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

    @property
    def vocab_size(self) -> int:
        """Of the tokenizer; a model may have ids beyond it, which say nothing."""
        size: int = self._tokenizer.get_vocab_size()
        return size

    async def encode(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """The token ids of each text, by default with the special tokens that a whole prompt
        begins with."""
        return await self._in_thread(self._encode, texts, add_special_tokens)

    async def encode_prompts(self, texts: Sequence[str]) -> list[Prompt]:
        """Whole prompts that know their text."""
        return await self._in_thread(self._encode_prompts, texts)

    async def decode_prompts(
        self, id_lists: Sequence[Sequence[int]], *, skip_special_tokens: bool
    ) -> list[Prompt]:
        """Prompts that were given as ids, with their text."""
        return await self._in_thread(self._decode_prompts, id_lists, skip_special_tokens)

    async def encode_chat(self, conversation: Conversation) -> list[int]:
        """The token ids of a conversation; the template brings its own special tokens.

        Raises ChatTemplateError.
        """
        return await self._in_thread(self._encode_chat, conversation)

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return await self._in_thread(self._decode, token_ids, skip_special_tokens)

    async def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Each token as it stands in the vocabulary."""
        return await self._in_thread(self._pieces, token_ids)

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

    def _encode_prompts(self, texts: Sequence[str]) -> list[Prompt]:
        encodings = self._tokenizer.encode_batch(list(texts))
        return [
            Prompt(encoding.ids, text, _offsets(encoding.offsets))
            for text, encoding in zip(texts, encodings, strict=True)
        ]

    def _decode_prompts(
        self, id_lists: Sequence[Sequence[int]], skip_special_tokens: bool
    ) -> list[Prompt]:
        prompts = []
        for token_ids in id_lists:
            detokenizer = self.detokenizer((), skip_special_tokens=skip_special_tokens)
            text, offsets = "", []
            for token_id in token_ids:
                offsets.append(len(text))
                text += detokenizer.push(token_id)
            prompts.append(Prompt(token_ids, text + detokenizer.flush(), offsets))
        return prompts

    def _encode_chat(self, conversation: Conversation) -> list[int]:
        if self._chat_template is None:
            raise ChatTemplateError(
                "This model has no chat template, so it takes no messages: use /v1/completions."
            )
        return self._encode([self._chat_template.render(conversation)], False)[0]

    def _decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def _pieces(self, token_ids: Sequence[int]) -> list[str]:
        return [self.words.piece(token_id) for token_id in token_ids]

    async def _in_thread(self, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(
            self._executor, function, *arguments
        )


def _offsets(spans: Sequence[tuple[int, int]]) -> list[int]:
    """Where each token begins: where the one before it ends, unless both are of one character.

    Tokenizers leave the space before a word out of its span, and give what they add none.
    """
    offsets, end = [], 0
    for start, stop in spans:
        offsets.append(end if start == stop else min(start, end))
        end = max(end, stop)
    return offsets


def _keep_no_prompts(tokenizer: Tokenizer) -> None:
    """A tokenizer remembers the words it has seen. One that does not split a text into words would
    remember whole prompts, up to 10,000 of them and 20 MB, and never see one again."""
    splitter = tokenizer.pre_tokenizer
    splits = splitter is not None and len(splitter.pre_tokenize_str("two words")) > 1
    if not splits and hasattr(tokenizer.model, "_resize_cache"):
        tokenizer.model._resize_cache(0)


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
