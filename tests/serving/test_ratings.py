"""Ratings, token ids and the prompt in answers, over a model whose ratings are known."""

from itertools import pairwise
from typing import Any

import httpx
import pytest

from tests.support.asking import CHAT, COMPLETIONS, body_of, both, streamed, texts_of, whole
from tests.support.http_server import HttpServer
from tests.support.parrot import rate
from tests.support.tokenizers import IM_END_ID

EMOJI = "one 😀 two 한국"


@pytest.fixture
def chat_prompt(server: HttpServer) -> Any:
    return lambda text: server.encode(
        f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    )


def ids_with_end(server: HttpServer, text: str) -> list[int]:
    return [*server.encode(text), IM_END_ID]


def bytes_of(server: HttpServer, token_ids: list[int]) -> bytes:
    return b"".join(server.codec.words.bytes_of(token_id) for token_id in token_ids)


def test_logprobs_of_a_completion(http: httpx.Client, server: HttpServer) -> None:
    text = "one two three"
    answer, _ = both(http, COMPLETIONS, body_of(COMPLETIONS, text, logprobs=3))
    [choice] = answer["choices"]
    found = choice["logprobs"]
    prompt, output = server.encode(text), ids_with_end(server, text)
    rows = [rate(before, token, 3) for before, token in pairwise([prompt[-1], *output])]
    word = server.codec.words.word
    assert found["tokens"] == [word(token) for token in output]
    assert found["token_logprobs"] == [row.logprob for row in rows]
    for entry, row, token in zip(found["top_logprobs"], rows, output, strict=True):
        tops = {word(top): logprob for top, logprob in row.top}
        assert entry == {**tops, word(token): row.logprob}
    for token, offset in zip(found["tokens"][:-1], found["text_offset"], strict=False):
        assert text[offset:].startswith(token)
    assert found["text_offset"][-1] == len(text)
    assert answer["usage"]["completion_tokens"] == len(output)


def test_logprobs_of_a_chat(http: httpx.Client, server: HttpServer, chat_prompt: Any) -> None:
    body = body_of(CHAT, EMOJI, logprobs=True, top_logprobs=2)
    answer, stream = both(http, CHAT, body)
    entries = answer["choices"][0]["logprobs"]["content"]
    output = ids_with_end(server, EMOJI)
    rows = [rate(before, token, 2) for before, token in pairwise([chat_prompt(EMOJI)[-1], *output])]
    assert [entry["logprob"] for entry in entries] == [row.logprob for row in rows]
    for entry, row in zip(entries, rows, strict=True):
        assert [top["logprob"] for top in entry["top_logprobs"]] == [p for _, p in row.top]
    said = b"".join(bytes(entry["bytes"]) for entry in entries[:-1])
    assert said.decode() == EMOJI  # also where a token is a part of a character
    assert any(entry["token"].startswith("bytes:\\x") for entry in entries)
    assert texts_of(answer) == {0: EMOJI}
    assert len(stream.chunks) > len(entries)  # a chunk for each token, whatever its text


def test_no_alternatives_unless_asked_for(http: httpx.Client) -> None:
    answer, _ = both(http, CHAT, body_of(CHAT, "one two", logprobs=True))
    entries = answer["choices"][0]["logprobs"]["content"]
    assert entries
    assert not any(entry["top_logprobs"] for entry in entries)
    answer, _ = both(http, COMPLETIONS, body_of(COMPLETIONS, "one two", logprobs=0))
    found = answer["choices"][0]["logprobs"]
    assert [list(tops) for tops in found["top_logprobs"]] == [[token] for token in found["tokens"]]


def test_ratings_end_with_the_token_that_completed_the_stop_text(
    http: httpx.Client, path: str
) -> None:
    ratings = {"logprobs": True} if path == CHAT else {"logprobs": 1}
    body = body_of(path, "one two three four", stop="two", **ratings, return_token_ids=True)
    answer, _ = both(http, path, body)
    [choice] = answer["choices"]
    num_tokens = answer["usage"]["completion_tokens"]
    assert len(choice["token_ids"]) == num_tokens
    logprobs = choice["logprobs"]
    assert len(logprobs["content"] if path == CHAT else logprobs["tokens"]) == num_tokens


@pytest.mark.parametrize("as_ids", [False, True])
def test_scoring(http: httpx.Client, server: HttpServer, as_ids: bool) -> None:
    """CASES 23."""
    prompt = server.encode(EMOJI)
    body = body_of(COMPLETIONS, EMOJI, echo=True, max_tokens=0, logprobs=1)
    answer, _ = both(http, COMPLETIONS, {**body, "prompt": prompt} if as_ids else body)
    [choice] = answer["choices"]
    assert choice["text"] == EMOJI
    assert choice["finish_reason"] == "length"
    found = choice["logprobs"]
    assert found["token_logprobs"] == [None, *(rate(a, b, 1).logprob for a, b in pairwise(prompt))]
    assert found["top_logprobs"][0] is None
    assert found["tokens"] == [server.codec.words.word(token) for token in prompt]
    assert {len(entries) for entries in found.values()} == {len(prompt)}
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        assert token.startswith("bytes:") or EMOJI[offset:].startswith(token)
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), 0)


def test_echo(http: httpx.Client, server: HttpServer) -> None:
    text = "one two three"
    plain, _ = both(http, COMPLETIONS, body_of(COMPLETIONS, text, echo=True))
    assert texts_of(plain) == {0: text + text}
    body = body_of(COMPLETIONS, text, echo=True, logprobs=2, n=2, max_tokens=2)
    rated, _ = both(http, COMPLETIONS, body)
    prompt, output = server.encode(text), server.encode(text)[:2]
    for choice in rated["choices"]:
        found = choice["logprobs"]
        assert len(found["tokens"]) == len(prompt) + len(output)
        assert found["token_logprobs"][0] is None
        assert found["text_offset"][len(prompt)] == len(text)
        assert "".join(found["tokens"]) == choice["text"]


def test_echo_of_several_prompts(http: httpx.Client, server: HttpServer) -> None:
    texts = ["one two", "three four five"]
    body = {**body_of(COMPLETIONS, "", echo=True, logprobs=1, max_tokens=0), "prompt": texts}
    answer, _ = both(http, COMPLETIONS, body)
    assert texts_of(answer) == dict(enumerate(texts))
    assert [len(choice["logprobs"]["tokens"]) for choice in answer["choices"]] == [
        len(server.encode(text)) for text in texts
    ]


def test_prompt_logprobs(
    http: httpx.Client, path: str, server: HttpServer, chat_prompt: Any
) -> None:
    text = "one two three"
    body = body_of(path, text, prompt_logprobs=2, n=2, max_tokens=3)
    answer, _ = both(http, path, body)
    prompt = chat_prompt(text) if path == CHAT else server.encode(text)
    holders = [answer] if path == CHAT else answer["choices"]
    for holder in holders:
        first, *entries = holder["prompt_logprobs"]
        assert first is None
        for (before, token), entry in zip(pairwise(prompt), entries, strict=True):
            row = rate(before, token, 2)
            assert entry[str(token)] == {
                "logprob": row.logprob,
                "rank": row.rank,
                "decoded_token": server.codec.words.word(token),
            }
            assert {int(key) for key in entry} == {token, *(top for top, _ in row.top)}
    assert not any("prompt_logprobs" in choice for choice in answer["choices"] if path == CHAT)


def test_prompt_logprobs_beside_echo_may_have_another_width(http: httpx.Client) -> None:
    body = body_of(COMPLETIONS, "one two three", echo=True, logprobs=1, prompt_logprobs=4)
    answer, _ = both(http, COMPLETIONS, body)
    [choice] = answer["choices"]
    assert max(len(tops) for tops in choice["logprobs"]["top_logprobs"] if tops) <= 2
    assert max(len(tops) for tops in choice["prompt_logprobs"] if tops) >= 4


def test_return_token_ids(
    http: httpx.Client, path: str, server: HttpServer, chat_prompt: Any
) -> None:
    answer, _ = both(http, path, body_of(path, EMOJI, return_token_ids=True))
    [choice] = answer["choices"]
    assert choice["token_ids"] == ids_with_end(server, EMOJI)
    if path == CHAT:
        assert answer["prompt_token_ids"] == chat_prompt(EMOJI)
    else:
        assert choice["prompt_token_ids"] == server.encode(EMOJI)
    plain = whole(http, path, body_of(path, EMOJI))
    assert "token_ids" not in plain["choices"][0]
    assert "prompt_token_ids" not in {**plain, **plain["choices"][0]}


@pytest.mark.parametrize(("given", "kept"), [(3, 3), (10_000, None), (-1, None)])
def test_truncate_prompt_tokens(
    http: httpx.Client, server: HttpServer, given: int, kept: int | None
) -> None:
    prompt = server.encode("one two three four five six")
    body = body_of(COMPLETIONS, "one two three four five six", return_token_ids=True, echo=True)
    answer, _ = both(http, COMPLETIONS, {**body, "truncate_prompt_tokens": given})
    [choice] = answer["choices"]
    expected = prompt[-kept:] if kept else prompt
    assert choice["prompt_token_ids"] == expected
    assert answer["usage"]["prompt_tokens"] == len(expected)
    assert choice["text"] == 2 * server.tokenizer.decode(expected)


def test_a_prompt_is_truncated_to_leave_room_for_the_output(
    http: httpx.Client, server: HttpServer
) -> None:
    [token] = server.encode("one")
    body = {"prompt": [token] * 3000, "max_tokens": 48, "truncate_prompt_tokens": -1}
    usage = whole(http, COMPLETIONS, body)["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2000, 48)
    messages = [{"role": "user", "content": "one " * 3000}]
    body = {"messages": messages, "truncate_prompt_tokens": -1}
    assert whole(http, CHAT, body)["usage"]["prompt_tokens"] == 2047


@pytest.mark.parametrize("stream", [True, False])
def test_the_ratings_of_a_long_prompt_are_no_sign_of_a_slow_client(
    server: HttpServer, http: httpx.Client, stream: bool
) -> None:
    """They come at once, and are more than a client that does not read may leave unread."""
    [token] = server.encode("on")
    body = {"prompt": [token] * 2000, "max_tokens": 30, "prompt_logprobs": 20, "ignore_eos": True}
    if stream:
        found = streamed(http, COMPLETIONS, body)
        assert (found.finishes, len(found.prompts[0]["prompt_logprobs"])) == ({0: "length"}, 2000)
    else:
        [choice] = whole(http, COMPLETIONS, body)["choices"]
        assert (choice["finish_reason"], len(choice["prompt_logprobs"])) == ("length", 2000)
