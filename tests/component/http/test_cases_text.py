"""CASES 2, 17 to 27, 29 and 30 over HTTP, over a real model: texts, ratings, usage, counters."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.component.http.conftest import TightServer
from tests.support.asking import (
    CHAT,
    COMPLETIONS,
    ask,
    ask_all,
    body_of,
    both,
    streamed,
    texts_of,
    whole,
    with_client,
)
from tests.support.http_server import MODEL, HttpServer
from tests.support.metrics import scrape
from tests.support.served_model import model_server

OPENING = "Once upon a time, there was a little girl named Lily."
END_ID = 2
NO_END = {"logit_bias": {str(END_ID): -100}}
CLOSE = 1e-4


@pytest.fixture(params=[COMPLETIONS, CHAT])
def path(request: pytest.FixtureRequest) -> str:
    path: str = request.param
    return path


def said(solo: httpx.Client, path: str) -> tuple[str, list[str]]:
    """What the model says to the opening: the text, and how it grows chunk by chunk."""
    pieces = streamed(solo, path, body_of(path, OPENING, max_tokens=40, **NO_END)).pieces
    return "".join(pieces), ["".join(pieces[:count]) for count in range(1, len(pieces))]


def test_case_2_echo_with_logprobs_in_a_tight_pool(
    solo: httpx.Client, squeezed: TightServer
) -> None:
    bodies = [
        {
            "prompt": [3 + (seed * 37 + place * 11) % 500 for place in range(150)],
            **NO_END,
            "echo": True,
            "logprobs": 1,
            "max_tokens": 30,
            "temperature": 0,
        }
        for seed in range(4)
    ]
    expected = [whole(solo, COMPLETIONS, body)["choices"][0] for body in bodies]

    async def run(client: httpx.AsyncClient) -> list[httpx.Response]:
        return await asyncio.gather(*(client.post(COMPLETIONS, json=body) for body in bodies))

    with squeezed(21, max_num_batched_tokens=32) as server:
        answers = [answer.json() for answer in with_client(server.url, run)]
        server.wait_idle()
    assert sum(a["usage"].get("preemption", {"count": 0})["count"] for a in answers) > 0
    for answer, alone in zip(answers, expected, strict=True):
        [choice] = answer["choices"]
        assert choice["text"] == alone["text"]
        first, *found = choice["logprobs"]["token_logprobs"]
        assert first is None
        assert len(found) == 150 - 1 + 30
        assert found == pytest.approx(alone["logprobs"]["token_logprobs"][1:], abs=CLOSE)
        assert choice["logprobs"]["tokens"] == alone["logprobs"]["tokens"]


def test_case_17_a_stop_text_that_straddles_tokens(solo: httpx.Client, path: str) -> None:
    text, grown = said(solo, path)
    borders = [len(part) for part in grown if 3 < len(part) < len(text) - 3]
    for border in borders[4:20:5]:
        stop = text[border - 2 : border + 2]
        answer, stream = both(
            solo, path, body_of(path, OPENING, max_tokens=40, stop=[stop], **NO_END)
        )
        assert texts_of(answer) == {0: text[: text.index(stop)]}
        assert stream.stop_reasons == {0: stop}
        assert stream.finishes == {0: "stop"}


def test_case_18_nothing_leaks_behind_a_stop_text(solo: httpx.Client, path: str) -> None:
    """Also where the stop text is complete with the last token there is."""
    body = body_of(path, OPENING, return_token_ids=True, **NO_END)
    for max_tokens in (10, 20, 30):
        text = texts_of(whole(solo, path, {**body, "max_tokens": max_tokens}))[0]
        stop = text[-2:]
        stopped = {**body, "max_tokens": max_tokens, "stop": [stop, "x" * 9]}
        answer, _ = both(solo, path, stopped)
        assert texts_of(answer) == {0: text[: text.index(stop)]}


def test_case_19_a_stop_text_that_never_comes_delays_nothing(solo: httpx.Client, path: str) -> None:
    body = body_of(path, OPENING, max_tokens=40, **NO_END)
    plain = streamed(solo, path, body)
    watched = streamed(solo, path, {**body, "stop": ["\ue000" * 40, "\ue001"]})
    assert watched.pieces == plain.pieces
    ambiguous = streamed(solo, path, {**body, "stop": [plain.texts[0][-1] + "\ue000" * 40]})
    assert ambiguous.texts == plain.texts


def test_case_20_min_tokens_holds_off_stop_texts(solo: httpx.Client, path: str) -> None:
    body = body_of(path, OPENING, min_tokens=200, max_tokens=200, stop=["\n", " ", "e"])
    answer, _ = both(solo, path, body)
    assert answer["usage"]["completion_tokens"] == 200


def test_case_21_min_tokens_are_generated_ones(solo: httpx.Client) -> None:
    prompt = [3 + place % 500 for place in range(60)]
    ends = {"logit_bias": {str(END_ID): 50}}
    body = {"prompt": prompt, "min_tokens": 50, "max_tokens": 64, "temperature": 0, **ends}
    assert whole(solo, COMPLETIONS, body)["usage"]["completion_tokens"] == 51
    body = {**body, "allowed_token_ids": [511], "return_token_ids": True}
    [choice] = whole(solo, COMPLETIONS, body)["choices"]
    assert choice["token_ids"] == [511] * 64  # the last id can still be sampled


@pytest.fixture(scope="module")
def two_ends(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    """The same model with two end-of-sequence ids and a temperature of its own."""
    directory = Path(shutil.copytree(model, tmp_path_factory.mktemp("ends") / "model"))
    generation = {"eos_token_id": [END_ID, 300], "temperature": 0.0, "max_new_tokens": 9}
    (directory / "generation_config.json").write_text(json.dumps(generation))
    with model_server(directory) as server:
        yield server


@pytest.mark.parametrize("end_id", [END_ID, 300])
def test_case_22_each_end_is_held_off_and_each_ends(two_ends: HttpServer, end_id: int) -> None:
    with httpx.Client(base_url=two_ends.url, timeout=30) as client:
        biased = {"logit_bias": {str(end_id): 100}, "return_token_ids": True}
        for min_tokens in (0, 12):
            body = body_of(COMPLETIONS, OPENING, min_tokens=min_tokens, max_tokens=30, **biased)
            [choice] = whole(client, COMPLETIONS, body)["choices"]
            *before, last = choice["token_ids"]
            assert (len(before), last) == (min_tokens, end_id)
            assert not {END_ID, 300} & set(before)
            assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
        two_ends.wait_idle()


def test_what_the_model_brings_holds_where_the_request_says_nothing(
    two_ends: HttpServer, solo: httpx.Client
) -> None:
    messages = [{"role": "user", "content": OPENING}]
    greedy = {"messages": messages, "max_tokens": 9, "temperature": 0, **NO_END}
    answer = whole(solo, CHAT, greedy)
    with httpx.Client(base_url=two_ends.url, timeout=30) as client:
        silent = whole(client, CHAT, {"messages": messages, **NO_END})
        assert texts_of(silent) == texts_of(answer)
        assert silent["usage"]["completion_tokens"] == 9
        loud = {"messages": messages, "temperature": 2, "seed": 1, "max_tokens": 30}
        assert not texts_of(whole(client, CHAT, loud))[0].startswith(texts_of(answer)[0])
        two_ends.wait_idle()


def test_case_23_scoring_rates_a_text_as_the_model_rated_it(solo: httpx.Client) -> None:
    """What was generated, given back as a prompt, is rated as it was then."""
    body = body_of(COMPLETIONS, OPENING, max_tokens=30, logprobs=1, return_token_ids=True, **NO_END)
    [choice] = whole(solo, COMPLETIONS, body)["choices"]
    ids = choice["prompt_token_ids"] + choice["token_ids"]
    scoring = {"prompt": ids, "echo": True, "max_tokens": 0, "logprobs": 1, "prompt_logprobs": 0}
    answer, _ = both(solo, COMPLETIONS, scoring)
    [scored] = answer["choices"]
    rated = scored["logprobs"]["token_logprobs"]
    assert len(rated) == len(ids)
    assert rated[0] is None
    assert rated[-30:] == pytest.approx(choice["logprobs"]["token_logprobs"], abs=CLOSE)
    assert scored["text"].endswith(choice["text"])
    assert answer["usage"]["completion_tokens"] == 0
    by_id = [
        entry[str(i)]["logprob"]
        for i, entry in zip(ids[1:], scored["prompt_logprobs"][1:], strict=True)
    ]
    assert by_id == rated[1:]
    text = body_of(COMPLETIONS, OPENING, echo=True, max_tokens=0, logprobs=1)
    assert texts_of(whole(solo, COMPLETIONS, text)) == {0: OPENING}


def test_case_24_half_a_character(solo: httpx.Client, roomy: HttpServer, path: str) -> None:
    """Bytes that never become a character: streamed or not, the same text."""
    words = roomy.codec.words
    first_byte = next(i for i in range(512) if words.bytes_of(i) == b"\xf0")
    for max_tokens in (1, 2, 40):
        body = body_of(path, OPENING, max_tokens=max_tokens, allowed_token_ids=[first_byte])
        answer, _ = both(solo, path, body)
        if max_tokens == 1:
            assert texts_of(answer) == {0: ""}  # a character that is cut off is left out


def test_case_25_each_choice_ends_once_and_usage_comes_last(solo: httpx.Client, path: str) -> None:
    """`Stream` refuses anything behind an end."""
    body = body_of(path, OPENING, n=2, temperature=1, seed=3, max_tokens=20)
    _, stream = both(solo, path, body)
    assert sorted(stream.finishes) == [0, 1]
    assert stream.chunks[-1]["choices"] == []
    assert stream.usage is not None


def test_case_26_usage_on_the_way(solo: httpx.Client, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = body_of(path, OPENING, n=2, max_tokens=20, temperature=1, seed=3)
    stream = streamed(solo, path, {**body, "stream_options": options})
    stream.assert_same_as(whole(solo, path, body))
    assert len(stream.running_usages) == len(stream.chunks) - 1
    counts = [usage["completion_tokens"] for usage in stream.running_usages]
    assert counts == sorted(counts)
    assert stream.usage is not None
    assert counts[-1] == stream.usage["completion_tokens"]
    assert {u["prompt_tokens"] for u in stream.running_usages} == {stream.usage["prompt_tokens"]}


def test_case_27_salts(squeezed: TightServer) -> None:
    with squeezed(100) as server, httpx.Client(base_url=server.url, timeout=30) as client:
        body = body_of(COMPLETIONS, OPENING * 3, max_tokens=20)
        cold = whole(client, COMPLETIONS, body)
        answers = {
            salt: whole(client, COMPLETIONS, {**body, "cache_salt": salt}) for salt in ("a", "b")
        }
        again = whole(client, COMPLETIONS, {**body, "cache_salt": "a"})
    for answer in answers.values():
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert texts_of(answer) == texts_of(cold)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32
    assert texts_of(again) == texts_of(cold)


def test_case_29_every_request_is_counted_once(squeezed: TightServer) -> None:
    """Ten that end, five whose clients leave while they run, five while they wait."""
    body = body_of(COMPLETIONS, OPENING, ignore_eos=True, stream=True)

    async def leave(client: httpx.AsyncClient, begun: list[int], number: int) -> None:
        endless = {**body, "max_tokens": 1500}
        async with client.stream("POST", COMPLETIONS, json=endless) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {") and number not in begun:
                    begun.append(number)

    async def cancel(tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def run(client: httpx.AsyncClient) -> None:
        begun: list[int] = []
        tasks = [asyncio.create_task(leave(client, begun, number)) for number in range(10)]
        info = server.engine.client.info
        async with asyncio.timeout(10):
            while len(begun) < 5 or info().waiting_requests < 5:
                await asyncio.sleep(0.01)
            await cancel([task for number, task in enumerate(tasks) if number not in begun])
            while info().waiting_requests:
                await asyncio.sleep(0.01)
        await cancel([tasks[number] for number in begun])
        jobs = (ask(client, COMPLETIONS, {**body, "max_tokens": 5}) for _ in range(10))
        await asyncio.gather(*jobs)

    with squeezed(500, max_num_seqs=5, step_seconds=0.005) as server:
        with_client(server.url, run)
        server.wait_idle()
        counters = server.run(server.engine.actor.status).counters
        found = scrape(server.url, MODEL)
    assert counters is not None
    assert counters.finished == {"length": 10, "abort": 10}
    assert found.value("requests_running") == 0
    assert sum(found.by_label("requests_waiting").values()) == 0
    assert found.value("time_to_first_token_seconds_count") == 15


def test_case_30_what_clients_are_told_of_preemptions_is_what_is_counted(
    squeezed: TightServer,
) -> None:
    bodies = [
        body_of(COMPLETIONS, OPENING, max_tokens=80, seed=seed, temperature=1, ignore_eos=True)
        for seed in range(8)
    ]
    with squeezed(20) as server:
        answers = ask_all(server.url, [(COMPLETIONS, body) for body in bodies])
        server.wait_idle()
        counters = server.run(server.engine.actor.status).counters
        found = scrape(server.url, MODEL)
    assert counters is not None
    told = [answer.preemption for answer in answers if answer.preemption]
    assert all(one["stalled_ms"] > 0 for one in told)
    number = sum(one["count"] for one in told)
    assert number == counters.preemptions["blocks"] > 0
    assert counters.scheduled_recompute_tokens == sum(one["recomputed_tokens"] for one in told)
    # One time to first token for each, however often it was interrupted; the pauses are apart.
    assert found.value("time_to_first_token_seconds_count") == len(bodies)
    assert found.value("request_preemptions_sum") == number
    counts = [answer.preemption.get("count", 0) for answer in answers]
    buckets = found.by_label("request_preemptions_bucket")
    assert buckets == {le: sum(count <= float(le) for count in counts) for le in buckets}
    assert buckets["0.0"] < buckets["+Inf"]
    # A preemption that strikes before the request has come to its next token extends the pause.
    num_pauses = found.value("preemption_stall_seconds_count", cause="blocks")
    assert len(told) <= num_pauses <= number
    stalled_seconds = sum(one["stalled_ms"] for one in told) / 1000
    assert found.value("preemption_stall_seconds_sum", cause="blocks") == pytest.approx(
        stalled_seconds, abs=1e-3
    )
    # Each choice ends with a token, so nothing lies between its first and its end but gaps.
    first, gaps, whole_seconds = (
        found.value(f"{name}_seconds_sum")
        for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency")
    )
    assert gaps == pytest.approx(whole_seconds - first, abs=1e-6)
    assert gaps >= stalled_seconds
