"""What the load client makes of answers that other servers give."""

import asyncio
import re

import pytest
from aiohttp import web

from cluster.bench_client import BenchClient, Outcome, first_model, open_session
from cluster.bench_options import BenchEndpoint
from cluster.bench_prompts import BenchRequest
from cluster.errors import CommandError
from tests.support.scripted_server import scripted_server, send_stream

DONE = b"data: [DONE]\n\n"
COMPLETION = b'data: {"choices": [{"text": "x"}]}\n\n'


def ask(url: str, endpoint: BenchEndpoint, request: BenchRequest) -> Outcome:
    async def one() -> Outcome:
        async with open_session(None, timeout_seconds=20) as session:
            return await BenchClient(session, url, endpoint, "odd", {}).ask(request)

    return asyncio.run(one())


def answer_of(*pieces: bytes, endpoint: BenchEndpoint = "completions") -> Outcome:
    """What comes of a prompt of three token ids, or of a chat, if this is the stream."""
    request = BenchRequest("hello" if endpoint == "chat" else [1, 2, 3], max_tokens=4)
    with scripted_server(lambda received: send_stream(received, *pieces)) as url:
        return ask(url, endpoint, request)


@pytest.mark.parametrize(
    ("deltas", "text", "num_tokens"),
    [
        (['{"role": "assistant", "content": ""}', '{"content": "a"}', '{"content": ""}'], "a", 2),
        (['{"reasoning": "a"}', '{"reasoning": "b"}', '{"content": "c"}'], "abc", 3),
        (['{"reasoning_content": "a"}', '{"reasoning_content": "a", "reasoning": "a"}'], "aa", 2),
        (['{"role": "assistant", "reasoning": "a", "content": "b"}', "{}"], "ab", 1),
        (['{"tool_calls": [{"index": 0}]}', '{"tool_calls": []}', '{"tool_calls": null}'], "", 1),
    ],
)
def test_every_kind_of_delta_is_a_token(deltas: list[str], text: str, num_tokens: int) -> None:
    pieces = [f'data: {{"choices": [{{"delta": {delta}}}]}}\n\n'.encode() for delta in deltas]
    found = answer_of(*pieces, DONE, endpoint="chat")
    assert (found.error, found.text, found.num_output_tokens) == (None, text, num_tokens)


def test_usage_may_come_without_choices_and_in_part() -> None:
    usage = b'data: {"choices": null, "usage": {"prompt_tokens": null, "completion_tokens": 7}}\n\n'
    found = answer_of(COMPLETION, usage, DONE)
    assert (found.error, found.prompt_tokens, found.output_tokens) == (None, 3, 7)


def test_without_usage_only_ids_are_counted() -> None:
    found = answer_of(COMPLETION, DONE)
    assert (found.prompt_tokens, found.output_tokens) == (3, None)
    said = b'data: {"choices": [{"delta": {"content": "x"}}]}\n\n'
    assert answer_of(said, DONE, endpoint="chat").prompt_tokens is None


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (b"data: [DONE]", None),
        (b"data: [DO", "the stream broke off"),
        (b'data: {"choices": [{"te', "the stream broke off"),
        (b'data: {"choices": 5}\n\n', "not what OpenAI's API has"),
        (b'data: {"choices": [{"text": "\xff"}]}\n\n', "not what OpenAI's API has"),
    ],
)
def test_the_last_line_may_lack_its_end(end: bytes, error: str | None) -> None:
    found = answer_of(COMPLETION, end)
    assert found.error is None if error is None else error in str(found.error)


def test_a_refusal_may_be_in_any_encoding() -> None:
    async def refuse(request: web.BaseRequest) -> web.Response:
        return web.Response(status=500, body="früh".encode("latin-1"))

    with scripted_server(refuse) as url:
        found = ask(url, "completions", BenchRequest([1], 1))
    assert found.error == "HTTP 500: fr\N{REPLACEMENT CHARACTER}h"


# -- which model ------------------------------------------------------------------------


def first_model_of(answer: web.Response) -> str:
    async def one(url: str) -> str:
        async with open_session("a key") as session:
            return await first_model(session, url)

    async def give(request: web.BaseRequest) -> web.Response:
        return answer

    with scripted_server(give) as url:
        return asyncio.run(one(url))


def test_the_first_model_is_taken_whatever_its_type_is_called() -> None:
    body = '{"data": [{"id": "one"}, {"id": "other"}]}'
    assert first_model_of(web.Response(text=body, content_type="text/plain")) == "one"


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (
            401,
            '{"error": {"message": "No key."}}',
            "missing or wrong: .* 401: No key. .* --api-key-",
        ),
        (403, "", "missing or wrong: .* HTTP 403: Forbidden. .* --api-key-file"),
        (404, "", "/v1/models answers HTTP 404: Not Found. .* --url, or the model with --model"),
        (503, '{"error": "starting"}', "/v1/models answers HTTP 503: starting. "),
        (200, "<html>", "names no model; name one with --model"),
        (200, '{"data": []}', "names no model; name one with --model"),
    ],
)
def test_why_no_model_is_named(status: int, body: str, message: str) -> None:
    with pytest.raises(CommandError) as raised:
        first_model_of(web.Response(status=status, text=body))
    assert re.search(message, str(raised.value)), raised.value
