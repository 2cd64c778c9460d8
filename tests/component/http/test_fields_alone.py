"""Fields whose effect is not seen by comparing two answers; and that no field lacks a test."""

import asyncio
from collections.abc import Iterator

import httpx
import pytest

from cluster.openai_api import NEUTRAL_VALUES, ChatCompletionRequest, CompletionRequest
from tests.component.http.conftest import TightServer
from tests.component.http.test_fields import BOTH, EFFECTS, NUM_TOKENS, OPENING, Answer, token_ids
from tests.support.asking import COMPLETIONS, ask, body_of, both, streamed, whole, with_client


def runs(ids: list[int], length: int) -> list[list[int]]:
    return [ids[start : start + length] for start in range(len(ids) - length + 1)]


def words_in(solo: httpx.Client, ids: list[int], length: int) -> Iterator[tuple[str, int]]:
    """Words of so many tokens, with the place of the last one. A ban finds the same tokens."""
    for start, run in enumerate(found := runs(ids, length)):
        word = solo.post("/detokenize", json={"tokens": run}).json()["prompt"].strip()
        if not word or run in found[:start]:
            continue
        for spelling in (word, f" {word}"):
            asked = {"prompt": spelling, "add_special_tokens": False}
            if solo.post("/tokenize", json=asked).json()["tokens"] == run:
                yield word, start + length - 1


def _never_completes_bad_words(solo: httpx.Client, path: str, body: Answer) -> None:
    """Only the last token of a word is held off, and only there: it was said before."""
    body = body | {"max_tokens": 100}
    said = token_ids(whole(solo, path, body))

    def without(word: str) -> list[int]:
        return token_ids(whole(solo, path, body | {"bad_words": [word]}))

    word, place = next(words_in(solo, said, 1))
    assert said[place] not in without(word)
    word, last = next(
        (word, last) for word, last in words_in(solo, said, 2) if said[last] in said[:last]
    )
    answer = without(word)
    assert answer[:last] == said[:last]
    assert said[last - 1 : last + 1] not in runs(answer, 2)


def _comes_in_pieces(solo: httpx.Client, path: str, body: Answer) -> None:
    _, stream = both(solo, path, body | {"stream": False, "stream_options": None})
    assert len(stream.pieces) > 1


def _tells_usage(solo: httpx.Client, path: str, body: Answer) -> None:
    for last, running in ((False, False), (True, False), (True, True)):
        options = {"include_usage": last, "continuous_usage_stats": running}
        stream = streamed(solo, path, body | {"stream_options": options})
        assert (stream.usage is not None, bool(stream.running_usages)) == (last, running)


OTHERS = {
    "bad_words": _never_completes_bad_words,
    "stream": _comes_in_pieces,
    "stream_options": _tells_usage,
}


def test_no_field_is_forgotten() -> None:
    fields = {*CompletionRequest.model_fields, *ChatCompletionRequest.model_fields}
    of_old_clients = {"best_of", "suffix", "function_call", "functions"}
    assert of_old_clients <= NEUTRAL_VALUES.keys()
    assert {*OTHERS, *(effect.name for effect in EFFECTS)} == fields - of_old_clients


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("name", OTHERS)
def test_other_fields(solo: httpx.Client, name: str, path: str) -> None:
    OTHERS[name](solo, path, body_of(path, OPENING, max_tokens=NUM_TOKENS, return_token_ids=True))


def test_priority(squeezed: TightServer) -> None:
    """With one place, who is more urgent is done first, whoever came first."""
    order: list[int] = []

    async def ask_one(client: httpx.AsyncClient, priority: int) -> None:
        body = body_of(COMPLETIONS, OPENING, max_tokens=20, priority=priority)
        await ask(client, COMPLETIONS, body)
        order.append(priority)

    async def run(client: httpx.AsyncClient) -> None:
        first = asyncio.create_task(ask_one(client, -9))
        await asyncio.sleep(0.1)
        rest = [asyncio.create_task(ask_one(client, priority)) for priority in (5, 3, 0, -2)]
        await asyncio.gather(first, *rest)

    with squeezed(100, policy="priority", max_num_seqs=1, step_seconds=0.01) as server:
        with_client(server.url, run)
    assert order == [-9, -2, 0, 3, 5]
