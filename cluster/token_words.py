"""What single tokens say, apart from the text that they are part of."""

import json
import re
from typing import Any

from tokenizers import Tokenizer

_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenWords:
    """Bytes and words of a tokenizer's tokens. Ids without a token say nothing."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {
            token_id: str(token.content)
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
        }
        decoders = _decoder_kinds(tokenizer)
        self._is_byte_level = "ByteLevel" in decoders
        self._has_byte_pieces = "ByteFallback" in decoders
        self._bytes: dict[int, bytes] = {}
        self._words: dict[int, str] = {}
        self._anchor: tuple[list[int], str] | None = None

    def piece(self, token_id: int) -> str:
        """As it stands in the vocabulary."""
        return self._tokenizer.id_to_token(token_id) or ""

    def bytes_of(self, token_id: int) -> bytes:
        """Also those of a token that is a part of a character."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._find_bytes(token_id)
        return found

    def word(self, token_id: int) -> str:
        """Its text; `bytes:\\xf0\\x9f` for bytes that are none by themselves."""
        found = self._words.get(token_id)
        if found is None:
            found = self._words[token_id] = _word(self.bytes_of(token_id))
        return found

    def _find_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        piece = self.piece(token_id)
        if self._is_byte_level:
            return _from_byte_letters(piece)
        if self._has_byte_pieces and (match := _BYTE_PIECE.fullmatch(piece)):
            return bytes([int(match[1], 16)])
        return self._text_in_context(token_id).encode() if piece else b""

    def _text_in_context(self, token_id: int) -> str:
        """Its text behind another token: at the beginning of a text decoders drop its space."""
        if self._anchor is None:
            self._anchor = self._find_anchor()
        before, text = self._anchor
        whole: str = self._tokenizer.decode([*before, token_id], skip_special_tokens=False)
        return whole.removeprefix(text)

    def _find_anchor(self) -> tuple[list[int], str]:
        for token_id in range(self._tokenizer.get_vocab_size()):
            text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
            if token_id not in self._added and text.isalpha() and text.isascii():
                return [token_id], text
        return [], ""


def _word(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def _decoder_kinds(tokenizer: Tokenizer) -> set[str]:
    if tokenizer.decoder is None:
        return set()
    decoder: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    return {part["type"] for part in (decoder, *decoder.get("decoders", ()))}


def _byte_letters() -> dict[str, int]:
    """The letter that byte-level vocabularies write for each byte: itself where it can be seen,
    and the next unused one from U+0100 on where not."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(0x100) if byte not in visible]
    letters = {chr(byte): byte for byte in visible}
    return letters | {chr(0x100 + place): byte for place, byte in enumerate(hidden)}


_BYTE_OF_LETTER = _byte_letters()


def _from_byte_letters(piece: str) -> bytes:
    return b"".join(
        bytes([_BYTE_OF_LETTER[letter]]) if letter in _BYTE_OF_LETTER else letter.encode()
        for letter in piece
    )
