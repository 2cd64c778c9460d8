"""Asking a server over HTTP, once or many times at once, streamed or not."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import httpx

from tests.support.events import Stream

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

Job: TypeAlias = tuple[str, dict[str, Any]]
"""A path, and the body to send there."""


@dataclass(slots=True)
class Answered:
    """One request's answer, streamed or not, in one form."""

    texts: dict[int, str]
    finishes: dict[int, str]
    usage: dict[str, Any]
    preemption: dict[str, Any] = field(default_factory=dict)
    token_logprobs: list[float] = field(default_factory=list)
    """Of the choices, one after the other, where there are any."""
    num_comments: int = 0
    """That kept its stream alive."""

    @property
    def content(self) -> tuple[object, ...]:
        """What must not depend on interruptions, nor on what the cache held."""
        counts = {name: self.usage[name] for name in ("prompt_tokens", "completion_tokens")}
        return self.texts, self.finishes, counts


async def ask(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Answered:
    """Send one request; raises AssertionError unless it is answered well."""
    if not body.get("stream"):
        answer = await client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        content = answer.json()
        choices = content["choices"]
        return _answered(
            {c["index"]: c.get("text") or c.get("message", {}).get("content", "") for c in choices},
            {c["index"]: c["finish_reason"] for c in choices},
            content["usage"],
            {c["index"]: c["logprobs"] for c in choices if c["logprobs"]},
        )
    body = {**body, "stream_options": {"include_usage": True}}
    async with client.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        stream = Stream().read([line async for line in answer.aiter_lines()])
    assert stream.error is None, stream.error
    assert stream.usage is not None
    answered = _answered(stream.texts, stream.finishes, stream.usage, stream.logprobs)
    answered.num_comments = stream.num_comments
    return answered


def _answered(
    texts: dict[int, str],
    finishes: dict[int, str],
    usage: dict[str, Any],
    logprobs: dict[int, dict[str, Any]],
) -> Answered:
    rated = [rating for index in sorted(logprobs) for rating in _ratings(logprobs[index])]
    return Answered(texts, finishes, usage, usage.get("preemption", {}), rated)


def _ratings(logprobs: dict[str, Any]) -> list[float]:
    """Of a chat's or a completion's choice."""
    if "content" in logprobs:
        return [token["logprob"] for token in logprobs["content"]]
    return [rating for rating in logprobs["token_logprobs"] if rating is not None]


def ask_all(
    url: str,
    jobs: list[Job],
    *,
    timeout_seconds: float = 120,
    headers: Mapping[str, str] | None = None,
) -> list[Answered]:
    """Send all requests at once; their answers in the same order."""

    async def run(client: httpx.AsyncClient) -> list[Answered]:
        return list(await asyncio.gather(*(ask(client, path, body) for path, body in jobs)))

    answers: list[Answered] = with_client(
        url, run, timeout_seconds=timeout_seconds, headers=headers
    )
    return answers


def with_client(
    url: str,
    work: Callable[[httpx.AsyncClient], Awaitable[Any]],
    *,
    timeout_seconds: float = 120,
    headers: Mapping[str, str] | None = None,
) -> Any:
    """Run `work` with a client that may have as many connections as it likes."""

    async def run() -> Any:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=url, timeout=timeout_seconds, limits=limits, headers=headers
        ) as client:
            return await work(client)

    return asyncio.run(run())


# -- one at a time, for tests that look at everything ----------------------------------------


def body_of(path: str, text: str, **fields: Any) -> dict[str, Any]:
    """A greedy request. A parrot answers it with `text`."""
    fields = {"temperature": 0, "max_tokens": 200, **fields}
    if path == CHAT:
        return {"messages": [{"role": "user", "content": text}], **fields}
    return {"prompt": text, **fields}


def whole(http: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    content: dict[str, Any] = answer.json()
    return content


def streamed(http: httpx.Client, path: str, body: dict[str, Any]) -> Stream:
    body = {"stream_options": {"include_usage": True}, **body, "stream": True}
    with http.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        return Stream().read(answer.iter_lines())


def texts_of(answer: dict[str, Any]) -> dict[int, str]:
    return {
        choice["index"]: choice["text"] if "text" in choice else choice["message"]["content"]
        for choice in answer["choices"]
    }


def both(http: httpx.Client, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], Stream]:
    """The whole answer and the stream, after checking that they say the same."""
    answer, stream = whole(http, path, body), streamed(http, path, body)
    stream.assert_same_as(answer)
    return answer, stream
