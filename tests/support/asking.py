"""Asking a server over HTTP, once or many times at once, streamed or not."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.support.events import Stream


@dataclass(slots=True)
class Answered:
    """One request's answer, streamed or not, in one form."""

    texts: dict[int, str]
    finishes: dict[int, str]
    usage: dict[str, Any]
    preemption: dict[str, Any] = field(default_factory=dict)

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
        )
    body = {**body, "stream_options": {"include_usage": True}}
    async with client.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        stream = Stream().read([line async for line in answer.aiter_lines()])
    assert stream.error is None, stream.error
    assert stream.usage is not None
    return _answered(stream.texts, stream.finishes, stream.usage)


def _answered(texts: dict[int, str], finishes: dict[int, str], usage: dict[str, Any]) -> Answered:
    return Answered(texts, finishes, usage, usage.get("preemption", {}))


def ask_all(
    url: str, jobs: list[tuple[str, dict[str, Any]]], *, timeout_seconds: float = 120
) -> list[Answered]:
    """Send all requests at once; their answers in the same order."""

    async def run(client: httpx.AsyncClient) -> list[Answered]:
        return list(await asyncio.gather(*(ask(client, path, body) for path, body in jobs)))

    answers: list[Answered] = with_client(url, run, timeout_seconds=timeout_seconds)
    return answers


def with_client(
    url: str, work: Callable[[httpx.AsyncClient], Awaitable[Any]], *, timeout_seconds: float = 120
) -> Any:
    """Run `work` with a client that may have as many connections as it likes."""

    async def run() -> Any:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=url, timeout=timeout_seconds, limits=limits
        ) as client:
            return await work(client)

    return asyncio.run(run())
