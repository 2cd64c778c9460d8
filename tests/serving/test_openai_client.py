"""The official client, as people use it."""

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from cluster.asgi import KeyDigests
from cluster.http_settings import HttpSettings
from configs import Config, SchedulerConfig
from tests.support.http_server import MODEL, HttpServer, http_server, parrot
from tests.support.parrot import Parrot


@dataclass(slots=True)
class Requests:
    """How often a client asked, by its own record."""

    num_sent: int = 0

    def count(self, request: object) -> None:
        self.num_sent += 1


def client_of(server: HttpServer, requests: Requests, *, max_retries: int) -> OpenAI:
    transport = openai.DefaultHttpxClient(event_hooks={"request": [requests.count]})
    return OpenAI(
        base_url=f"{server.url}/v1",
        api_key="none",
        http_client=transport,
        max_retries=max_retries,
    )


@pytest.fixture
def client(server: HttpServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        yield client
    server.wait_idle()


def test_completion(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="one two three", temperature=0)
    assert answer.choices[0].text == "one two three"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_chat_completion(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "one two three"}], temperature=0
    )
    assert answer.choices[0].message.content == "one two three"
    assert answer.choices[0].message.role == "assistant"
    assert answer._request_id


def test_streaming_with_usage(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "one two three"}],
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "one two three"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens_details is not None


def test_logprobs(client: OpenAI) -> None:
    chat = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "one 😀"}],
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    *said, end = logprobs.content
    assert b"".join(bytes(entry.bytes or ()) for entry in said).decode() == "one 😀"
    assert end.token == "<|im_end|>"
    assert {len(entry.top_logprobs) for entry in said} == {2}
    scored = client.completions.create(
        model=MODEL, prompt="one two three", echo=True, max_tokens=0, logprobs=1
    )
    rated = scored.choices[0].logprobs
    assert rated is not None
    assert rated.tokens is not None
    assert rated.token_logprobs is not None
    assert "".join(rated.tokens) == scored.choices[0].text == "one two three"
    assert len(rated.token_logprobs) == len(rated.tokens)


def test_leaving_a_stream(client: OpenAI) -> None:
    stream = client.completions.create(
        model=MODEL, prompt="one", max_tokens=1000, stream=True, extra_body={"ignore_eos": True}
    )
    for _ in stream:
        break
    stream.close()


def test_choices_and_stop_texts(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "one two three four"}],
        n=3,
        temperature=0,
        stop=["three"],
    )
    assert [choice.message.content for choice in answer.choices] == ["one two "] * 3
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="The model `x` does not exist"):
        client.models.retrieve("x")


def test_mistakes_raise_the_clients_own_errors_and_are_not_sent_again(server: HttpServer) -> None:
    requests = Requests()
    with client_of(server, requests, max_retries=2) as client:
        with pytest.raises(openai.BadRequestError, match="temperature must be at most 2") as caught:
            client.completions.create(model=MODEL, prompt="x", temperature=3)
        assert caught.value.param == "temperature"
        assert caught.value.request_id
        with pytest.raises(openai.NotFoundError) as unknown:
            client.completions.create(model="x", prompt="x")
        assert unknown.value.code == "model_not_found"
        assert requests.num_sent == 2


def test_a_wrong_key() -> None:
    keys = KeyDigests.of(["a-key"])
    with http_server(settings=HttpSettings(api_keys=keys)) as server:
        with (
            OpenAI(base_url=f"{server.url}/v1", api_key="b-key") as stranger,
            pytest.raises(openai.AuthenticationError),
        ):
            stranger.models.list()
        with OpenAI(base_url=f"{server.url}/v1", api_key="a-key") as friend:
            assert friend.models.list().data


def test_async(server: HttpServer) -> None:
    async def ask() -> None:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            answer = await client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "one two"}], temperature=0
            )
            assert answer.choices[0].message.content == "one two"
            assert (await client.models.retrieve(MODEL)).id == MODEL
            with pytest.raises(openai.BadRequestError):
                await client.completions.create(model=MODEL, prompt="x", n=0)

    asyncio.run(ask())


def test_many_at_once(server: HttpServer) -> None:
    async def ask_all() -> list[str]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:

            async def ask(number: int) -> str:
                text = f"this is the request with number {number}"
                stream = await client.completions.create(
                    model=MODEL, prompt=text, temperature=0, max_tokens=60, stream=True
                )
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*(ask(number) for number in range(40)))

    texts = asyncio.run(ask_all())
    assert texts == [f"this is the request with number {number}" for number in range(40)]
    server.wait_idle()


def test_a_fault_of_ours_is_sent_again() -> None:
    model = parrot()
    assert isinstance(model.worker, Parrot)
    model.worker.fail_with = "the sampler met a number that is none"
    requests = Requests()
    with http_server(model=model) as server, client_of(server, requests, max_retries=1) as client:
        with pytest.raises(openai.InternalServerError, match="met a number that is none"):
            client.completions.create(model=MODEL, prompt="one")
        assert requests.num_sent == 2
        stream = client.completions.create(model=MODEL, prompt="one", stream=True)
        with pytest.raises(openai.APIError, match="met a number that is none"):
            list(stream)


def test_an_engine_that_is_gone_is_an_internal_server_error() -> None:
    requests = Requests()
    with http_server() as server, client_of(server, requests, max_retries=0) as client:
        server.run(lambda: server.engine.actor.give_up("the test pulled the plug"))
        with pytest.raises(openai.InternalServerError, match="pulled the plug") as caught:
            client.completions.create(model=MODEL, prompt="one")
        assert caught.value.status_code == 503


def test_the_client_tries_again_when_the_queue_is_full() -> None:
    config = Config(scheduler=SchedulerConfig(max_num_seqs=1, max_waiting_requests=1))
    with (
        http_server(config, step_seconds=0.01) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as hasty,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=3) as patient,
    ):
        body = {"prompt": "one", "max_tokens": 1500, "ignore_eos": True, "stream": True}
        url = f"{server.url}/v1/completions"
        with ThreadPoolExecutor() as pool, httpx.stream("POST", url, json=body) as running:
            lines = running.iter_lines()
            next(lines)
            with httpx.stream("POST", url, json=body):
                with pytest.raises(openai.RateLimitError):
                    hasty.completions.create(model=MODEL, prompt="one", temperature=0)
                asking = pool.submit(
                    patient.completions.create, model=MODEL, prompt="one", temperature=0
                )
                time.sleep(0.5)  # it is refused, and waits
            running.close()
            assert asking.result().choices[0].text == "one"
