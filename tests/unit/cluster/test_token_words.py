"""What single tokens say, in the vocabularies that models come with."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from cluster.token_words import TokenWords
from tests.support.tokenizers import byte_fallback, byte_level


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@given(text=st.text(max_size=40))
def test_the_bytes_of_all_tokens_are_the_text(make: Callable[[], Tokenizer], text: str) -> None:
    tokenizer = make()
    words = TokenWords(tokenizer)
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    said = b"".join(words.bytes_of(token_id) for token_id in token_ids).decode()
    if make is byte_fallback:
        said = said.replace("▁", " ")  # which it cannot tell from a space
        assert said in (text.replace("▁", " "), " " + text.replace("▁", " "))
    else:
        assert said == text


def test_words() -> None:
    words = TokenWords(byte_level())
    tokenizer = byte_level()
    assert [words.word(i) for i in tokenizer.encode(" two").ids][-1].endswith("two")
    assert words.word(2) == "<|im_end|>"
    [*parts] = tokenizer.encode("é").ids
    assert [words.word(i) for i in parts] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert (words.word(10_000), words.bytes_of(10_000), words.piece(10_000)) == ("", b"", "")


def test_words_that_carry_their_space_keep_it() -> None:
    tokenizer = byte_fallback()
    words = TokenWords(tokenizer)
    assert words.word(tokenizer.token_to_id("▁the")) == " the"
    assert words.word(tokenizer.token_to_id("<s>")) == "<s>"
    assert words.bytes_of(tokenizer.token_to_id("<0xF0>")) == b"\xf0"


def test_words_that_are_continued() -> None:
    vocabulary = {"play": 0, "##ing": 1, "[UNK]": 2}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    words = TokenWords(tokenizer)
    assert words.word(1) == "ing"
