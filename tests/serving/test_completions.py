"""Both endpoints, whole and streamed, over a model that repeats its prompt."""

import httpx
import pytest

from tests.support.asking import CHAT, COMPLETIONS, body_of, both, streamed, texts_of, whole
from tests.support.http_server import MODEL, HttpServer

EMOJI = "Family 👩‍👩‍👧, flag 🇰🇷, Hangul 한국어, naïve café. 😀"


def test_an_answer_ends_by_itself(http: httpx.Client, path: str) -> None:
    answer, stream = both(http, path, body_of(path, "one two three"))
    assert texts_of(answer) == {0: "one two three"}
    assert stream.finishes == {0: "stop"}
    assert len(stream.pieces) > 1


def test_an_answer_is_cut_at_max_tokens(http: httpx.Client, path: str, server: HttpServer) -> None:
    answer, stream = both(http, path, body_of(path, "one two three four", max_tokens=2))
    assert stream.finishes == {0: "length"}
    tokens = server.encode("one two three four")[:2]
    assert texts_of(answer) == {0: server.tokenizer.decode(tokens)}
    assert answer["usage"]["completion_tokens"] == 2


def test_the_parts_of_an_answer(http: httpx.Client, server: HttpServer) -> None:
    answer = whole(http, COMPLETIONS, body_of(COMPLETIONS, "one two"))
    num_prompt = len(server.encode("one two"))
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["model"] == MODEL
    assert answer["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_prompt + 1,  # and the end of the sequence
        "total_tokens": 2 * num_prompt + 1,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    chat = whole(http, CHAT, body_of(CHAT, "one two"))
    assert chat["id"].startswith("chatcmpl-")
    assert chat["object"] == "chat.completion"
    assert chat["choices"][0]["message"]["role"] == "assistant"
    chunk = streamed(http, CHAT, body_of(CHAT, "one two")).chunks[0]
    assert chunk["object"] == "chat.completion.chunk"
    assert chunk["choices"][0]["delta"] == {"role": "assistant", "content": ""}


def test_characters_of_several_tokens_come_whole(http: httpx.Client, path: str) -> None:
    """CASES 24: pieces that join to this text hold no half character."""
    answer, stream = both(http, path, body_of(path, EMOJI))
    assert texts_of(answer) == {0: EMOJI}
    assert "😀" in stream.pieces


def test_a_character_cut_by_max_tokens(http: httpx.Client, path: str, server: HttpServer) -> None:
    num_tokens = len(server.encode("one 😀")) - 1
    answer, _ = both(http, path, body_of(path, "one 😀", max_tokens=num_tokens))
    assert texts_of(answer) == {0: "one "}


@pytest.mark.parametrize(
    ("text", "stop", "kept"),
    [
        ("The quick brown fox jumps over", "own fox", "The quick br"),  # CASES 17
        ("alpha beta gamma delta", ["nothing", "beta gamma"], "alpha "),
        ("one two three four five six seven", ["five"], "one two three four "),  # CASES 18
        ("one two three", "x" * 40, "one two three"),  # CASES 19
        ("one two three", ["three", "two three"], "one "),
    ],
)
def test_stop_texts(
    http: httpx.Client, path: str, text: str, stop: str | list[str], kept: str
) -> None:
    answer, stream = both(http, path, body_of(path, text, stop=stop))
    assert texts_of(answer) == {0: kept}
    stop_reason = stream.stop_reasons[0]
    assert stop_reason is None if kept == text else text.startswith(kept + stop_reason)


def test_a_stop_text_that_never_comes_delays_nothing(http: httpx.Client, path: str) -> None:
    plain = streamed(http, path, body_of(path, "one two three four five"))
    watched = streamed(http, path, body_of(path, "one two three four five", stop="x" * 40))
    assert watched.pieces == plain.pieces


def test_the_stop_text_is_part_of_the_answer_if_wanted(http: httpx.Client, path: str) -> None:
    fields = {"stop": "two", "include_stop_str_in_output": True}
    answer, _ = both(http, path, body_of(path, "one two three", **fields))
    assert texts_of(answer) == {0: "one two"}


def test_usage_ends_with_the_token_that_completed_the_stop_text(
    http: httpx.Client, path: str, server: HttpServer
) -> None:
    answer, _ = both(http, path, body_of(path, "one two three four five six", stop="two"))
    num_tokens = answer["usage"]["completion_tokens"]
    decoded = server.tokenizer.decode(server.encode("one two three")[:num_tokens])
    assert "two" in decoded
    assert "two" not in server.tokenizer.decode(server.encode("one two three")[: num_tokens - 1])


def test_min_tokens_holds_off_stop_texts(http: httpx.Client, path: str) -> None:
    """CASES 20: as many tokens as were asked for, whatever they say."""
    fields = {"min_tokens": 200, "max_tokens": 200, "stop": ["\n"]}
    answer, _ = both(http, path, body_of(path, "one\ntwo\n", **fields))
    assert answer["usage"]["completion_tokens"] == 200
    assert answer["choices"][0]["finish_reason"] == "length"


def test_stop_token_ids(http: httpx.Client, path: str, server: HttpServer) -> None:
    *_, stop_id = server.encode("one two three")
    answer, _ = both(http, path, body_of(path, "one two three", stop_token_ids=[stop_id]))
    assert answer["choices"][0]["stop_reason"] == stop_id
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert texts_of(answer)[0] != "one two three"


def test_allowed_token_ids(http: httpx.Client, path: str) -> None:
    """CASES 11: a long list is no problem."""
    fields = {"allowed_token_ids": list(range(3, 300)), "max_tokens": 5}
    answer, _ = both(http, path, body_of(path, "one", **fields))
    assert answer["usage"]["completion_tokens"] == 5


def test_special_tokens_appear_if_wanted(http: httpx.Client) -> None:
    """As a part of the output; the token that ends it never does."""
    body = {"prompt": [1, 2, 1], "temperature": 0, "max_tokens": 3, "ignore_eos": True}
    assert texts_of(whole(http, COMPLETIONS, body)) == {0: ""}
    body["skip_special_tokens"] = False
    assert texts_of(whole(http, COMPLETIONS, body)) == {0: "<|im_start|><|im_end|><|im_start|>"}


@pytest.fixture
def prompts(server: HttpServer) -> list[str]:
    return ["one two", "three four", "five six seven"]


def test_prompts_in_all_their_forms(
    http: httpx.Client, server: HttpServer, prompts: list[str]
) -> None:
    id_lists = [server.encode(prompt) for prompt in prompts]
    fields = {"temperature": 0, "max_tokens": 30}
    for prompt, texts in (
        (prompts[0], prompts[:1]),
        (prompts, prompts),
        (id_lists[0], prompts[:1]),
        (id_lists, prompts),
    ):
        answer, _ = both(http, COMPLETIONS, {"prompt": prompt, **fields})
        assert texts_of(answer) == dict(enumerate(texts))
        num_prompt_tokens = sum(len(server.encode(text)) for text in texts)
        assert answer["usage"]["prompt_tokens"] == num_prompt_tokens


def test_several_choices(http: httpx.Client, path: str, server: HttpServer) -> None:
    """CASES 25: `Stream` sees to it that each choice ends once, and usage comes last."""
    text = "one two three four five six seven eight nine ten"
    body = body_of(path, text, n=4, temperature=1, seed=5)
    answer, stream = both(http, path, body)
    assert len(set(stream.texts.values())) > 1
    assert sorted(stream.finishes) == [0, 1, 2, 3]
    alone = whole(http, path, body_of(path, text, temperature=1, seed=5))
    assert texts_of(alone)[0] == texts_of(answer)[0]
    assert alone["usage"]["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    num_tokens = sum(len(server.encode(text)) + 1 for _ in range(4))
    assert answer["usage"]["completion_tokens"] == num_tokens


def test_choices_of_several_prompts(http: httpx.Client, prompts: list[str]) -> None:
    body = {"prompt": prompts, "n": 2, "temperature": 0, "max_tokens": 30}
    answer, _ = both(http, COMPLETIONS, body)
    twice = [prompt for prompt in prompts for _ in range(2)]
    assert texts_of(answer) == dict(enumerate(twice))


def test_equal_prompts_without_a_seed_say_different_things(http: httpx.Client) -> None:
    text = "one two three four five six seven eight nine ten"
    body = {"prompt": [text] * 8, "temperature": 1, "max_tokens": 3}
    assert len(set(texts_of(whole(http, COMPLETIONS, body)).values())) > 1
    seeded = whole(http, COMPLETIONS, {**body, "seed": 3})
    assert len(set(texts_of(seeded).values())) == 1


def test_running_usage(http: httpx.Client, path: str) -> None:
    """CASES 26: on each chunk, never falling, up to the sum of all choices."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = body_of(path, "one two three four", n=2, stream_options=options)
    stream = streamed(http, path, body)
    assert stream.usage is not None
    assert len(stream.running_usages) == len(stream.chunks) - 1
    completion_tokens = [usage["completion_tokens"] for usage in stream.running_usages]
    assert completion_tokens == sorted(completion_tokens)
    assert completion_tokens[-1] == stream.usage["completion_tokens"]
    assert {usage["prompt_tokens"] for usage in stream.running_usages} == {
        stream.usage["prompt_tokens"]
    }


def test_no_usage_unless_asked_for(http: httpx.Client, path: str) -> None:
    stream = streamed(http, path, body_of(path, "one", stream_options=None))
    assert stream.usage is None
    assert not stream.running_usages


def test_cached_tokens(http: httpx.Client, path: str) -> None:
    text = f"{path} asks for a cached prefix. " * 10
    first, second = (
        whole(http, path, body_of(path, text, max_tokens=1))["usage"] for _ in range(2)
    )
    assert first["prompt_tokens_details"]["cached_tokens"] < 32
    cached_tokens = second["prompt_tokens_details"]["cached_tokens"]
    assert cached_tokens % 16 == 0
    assert second["prompt_tokens"] - 17 < cached_tokens < second["prompt_tokens"]


def test_a_salt_keeps_prefixes_apart(http: httpx.Client, path: str) -> None:
    """CASES 27."""
    text = f"{path} is salted. " * 20
    body = body_of(path, text, max_tokens=5)
    answers = [whole(http, path, {**body, "cache_salt": salt}) for salt in ("a", "b", "a")]
    cached = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers]
    assert cached[:2] == [0, 0]
    assert cached[2] > 0
    assert texts_of(answers[0]) == texts_of(answers[1]) == texts_of(answers[2])


def test_a_message_of_the_model_may_lack_a_text(http: httpx.Client) -> None:
    """One that called a tool has none, and chat templates add texts to each other."""
    user = {"role": "user", "content": "one two"}
    answers = [
        whole(http, CHAT, {"messages": [user, {"role": "assistant", "content": content}, user]})
        for content in (None, "")
    ]
    prompts = [answer["usage"]["prompt_tokens"] for answer in answers]
    assert prompts[0] == prompts[1]


def test_content_in_parts(http: httpx.Client) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    body = {"messages": [{"role": "user", "content": parts}], "temperature": 0}
    assert texts_of(whole(http, CHAT, body)) == {0: "one\ntwo"}
