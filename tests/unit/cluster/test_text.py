"""Detokenization as tokens come, and the way from prompts to token ids."""

import asyncio
import json
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from cluster.chat_template import ChatTemplateError, Conversation
from cluster.text import Detokenizer, TextCodec
from tests.support.tokenizers import (
    CHAT_TEMPLATE,
    END_OF_TEXT_ID,
    IM_END_ID,
    IM_START_ID,
    SPECIAL_TOKENS,
    byte_fallback,
    byte_level,
)

TOKENIZERS = {"byte level": byte_level, "byte fallback": byte_fallback}
EMOJI = "Family 👩‍👩‍👧, flag 🇰🇷, Hangul 한국어, and more: naïve café. 😀!"


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return TOKENIZERS[request.param]()


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def pieces_of(
    tokenizer: Tokenizer, token_ids: Sequence[int], prompt: Sequence[int] = (), *, skip: bool = True
) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=skip)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    token_ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return token_ids


@given(text=st.text(max_size=60))
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_pieces_join_to_the_text(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    first, *token_ids = encode(tokenizer, "! " + text)
    prompt = [first]
    whole = tokenizer.decode([first, *token_ids]).rstrip("\ufffd")
    output = "".join(pieces_of(tokenizer, token_ids, prompt))
    assert (tokenizer.decode(prompt) + output).rstrip("\ufffd") == whole


def test_characters_come_whole(tokenizer: Tokenizer) -> None:
    pieces = pieces_of(tokenizer, encode(tokenizer, EMOJI))
    assert "".join(pieces) == EMOJI
    assert not any("\ufffd" in piece for piece in pieces)
    assert "" in pieces  # something had to be waited for


def test_each_piece_comes_as_soon_as_it_can(tokenizer: Tokenizer) -> None:
    token_ids = encode(tokenizer, EMOJI)
    detokenizer = Detokenizer(tokenizer, (), skip_special_tokens=True)
    given_out = ""
    for end, token_id in enumerate(token_ids, 1):
        given_out += detokenizer.push(token_id)
        so_far = tokenizer.decode(token_ids[:end])
        if not so_far.endswith("\ufffd"):
            assert given_out == so_far


def test_a_character_cut_off_at_the_end_is_left_out(tokenizer: Tokenizer) -> None:
    token_ids = encode(tokenizer, "a 😀")[:-1]
    assert "".join(pieces_of(tokenizer, token_ids)) == "a "


def test_a_prompt_may_end_inside_of_a_character(tokenizer: Tokenizer) -> None:
    token_ids = encode(tokenizer, "some words and a 😀!")
    cut = len(encode(tokenizer, "some words and a ")) + 1
    assert "".join(pieces_of(tokenizer, token_ids[cut:], token_ids[:cut])) in ("😀!", " 😀!")


def test_a_word_keeps_the_space_before_it() -> None:
    tokenizer = byte_fallback()
    prompt, output = encode(tokenizer, "one"), encode(tokenizer, "one the one")[1:]
    assert "".join(pieces_of(tokenizer, output, prompt)) == " the one"
    assert "".join(pieces_of(tokenizer, output)) == "the one"


def test_bytes_that_never_become_text_are_given_up_on(tokenizer: Tokenizer) -> None:
    """Waiting for ever would cost more with each token, and hide the rest of the text."""
    half = encode(tokenizer, "😀")[-2]
    detokenizer = Detokenizer(tokenizer, (), skip_special_tokens=True)
    pieces = [detokenizer.push(half) for _ in range(5000)]
    assert sum(map(len, pieces)) >= 4900
    after = [detokenizer.push(token_id) for token_id in encode(tokenizer, "x, on we go.")]
    assert "".join(after).endswith(", on we go.")


def test_special_tokens_are_left_out_unless_wanted() -> None:
    tokenizer = byte_level()
    token_ids = [*encode(tokenizer, "one two"), IM_END_ID, *encode(tokenizer, " three")]
    assert "".join(pieces_of(tokenizer, token_ids)) == "one two three"
    assert "".join(pieces_of(tokenizer, token_ids, skip=False)) == "one two<|im_end|> three"


def test_ids_without_a_text_are_passed_over() -> None:
    """The vocabulary of a model may be larger than that of its tokenizer."""
    assert "".join(pieces_of(byte_level(), [60_000, *encode(byte_level(), "on")])) == "on"


def test_decoding_does_not_slow_down_with_the_length() -> None:
    tokenizer = byte_level()
    token_ids = encode(tokenizer, "The quick brown fox jumps over the lazy dog. ") * 600
    detokenizer = Detokenizer(tokenizer, token_ids, skip_special_tokens=True)
    began = time.process_time()
    for token_id in token_ids:
        detokenizer.push(token_id)
    assert (time.process_time() - began) / len(token_ids) < 100e-6


# -- encoding ----------------------------------------------------------------------------


@pytest.fixture
def model_directory(tmp_path: Path) -> Path:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    settings = {"eos_token": SPECIAL_TOKENS[IM_END_ID], "bos_token": {"content": "<|im_start|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return tmp_path


def test_prompts_become_token_ids(model_directory: Path, executor: ThreadPoolExecutor) -> None:
    codec = TextCodec.load(model_directory, executor)
    token_ids = asyncio.run(codec.encode(["one two", ""]))
    assert token_ids == [encode(byte_level(), "one two"), []]
    assert asyncio.run(codec.decode(token_ids[0])) == "one two"


def test_prompts_get_the_special_tokens_of_the_model(executor: ThreadPoolExecutor) -> None:
    codec = TextCodec(byte_fallback(), None, executor)
    ((first, *_),) = asyncio.run(codec.encode(["one"]))
    assert first == byte_fallback().token_to_id("<s>")


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_prompts_are_not_kept(kind: str, executor: ThreadPoolExecutor) -> None:
    """Each prompt is another one, of words that come again."""
    codec = TextCodec(TOKENIZERS[kind](), None, executor)
    rng = random.Random(3)
    words = ["".join(rng.choices("abcdefgh", k=8)) for _ in range(500)]

    async def encode(num_batches: int) -> int:
        for _ in range(num_batches):
            await codec.encode([" ".join(rng.choices(words, k=15)) for _ in range(20)])
        return int(psutil.Process().memory_info().rss)

    before_bytes = asyncio.run(encode(20))
    after_bytes = asyncio.run(encode(100))
    assert after_bytes - before_bytes < 2_000_000


def test_messages_become_token_ids(model_directory: Path, executor: ThreadPoolExecutor) -> None:
    codec = TextCodec.load(model_directory, executor)
    token_ids = asyncio.run(codec.encode_chat(Conversation([{"role": "user", "content": "one"}])))
    assert (
        asyncio.run(codec.decode(token_ids))
        == "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
    )
    assert token_ids.count(IM_START_ID) == 2


def test_a_template_may_stand_in_the_tokenizer_config(
    model_directory: Path, executor: ThreadPoolExecutor
) -> None:
    (model_directory / "chat_template.jinja").unlink()
    named = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"},
    ]
    settings = json.loads((model_directory / "tokenizer_config.json").read_text())
    settings["chat_template"] = named
    (model_directory / "tokenizer_config.json").write_text(json.dumps(settings))
    codec = TextCodec.load(model_directory, executor)
    token_ids = asyncio.run(codec.encode_chat(Conversation([{"role": "user", "content": "one"}])))
    assert asyncio.run(codec.decode(token_ids)) == "<|im_start|>one<|im_end|>"


def test_a_model_without_a_template_takes_no_messages(
    model_directory: Path, executor: ThreadPoolExecutor
) -> None:
    (model_directory / "chat_template.jinja").unlink()
    codec = TextCodec.load(model_directory, executor)
    assert not codec.has_chat_template
    with pytest.raises(ChatTemplateError, match="use /v1/completions"):
        asyncio.run(codec.encode_chat(Conversation([{"role": "user", "content": "one"}])))


def test_encoding_a_large_prompt_leaves_the_event_loop_alone(
    executor: ThreadPoolExecutor,
) -> None:
    codec = TextCodec(byte_level(), None, executor)
    num_turns = 0

    async def count_turns() -> None:
        nonlocal num_turns
        while True:
            await asyncio.sleep(0)
            num_turns += 1

    async def encode_large() -> None:
        counting = asyncio.create_task(count_turns())
        await codec.encode(["The quick brown fox jumps over the lazy dog. " * 10_000])
        counting.cancel()

    asyncio.run(encode_large())
    assert num_turns > 20


def test_the_end_of_text_is_a_special_token() -> None:
    assert byte_level().id_to_token(END_OF_TEXT_ID) == SPECIAL_TOKENS[END_OF_TEXT_ID]
