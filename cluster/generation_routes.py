"""The two routes that generate: one request becomes one answer, whole or in chunks."""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response

from cluster.answers import DONE, KEEP_ALIVE, AnswerWriter, Shown, frame
from cluster.api_errors import ApiError, TooManyRequestsError, our_fault
from cluster.asgi import ClientGoneError
from cluster.choice import Piece, joined
from cluster.event_stream import EventStream, disconnected
from cluster.frontend import Frontend
from cluster.generation import Generation
from cluster.http_settings import HttpSettings
from cluster.openai_api import ApiRequest, ChatCompletionRequest, CompletionRequest, Endpoint
from cluster.queue_share import QueueShare
from cluster.usage import UsageCount

logger = logging.getLogger(__name__)

T = TypeVar("T")
W = TypeVar("W")

# Writing the ratings of one token takes up to 0.1 ms.
_MANY_RATED_TOKENS = 200


def generation_routes(frontend: Frontend, settings: HttpSettings) -> APIRouter:
    share = QueueShare(settings.max_waiting_requests // 2, settings.max_waiting_tokens // 2)
    endpoints = _Endpoints(frontend, settings, share)
    router = APIRouter(tags=["generation"])
    content: dict[str, Any] = {"application/json": {}, "text/event-stream": {}}
    answers: dict[int | str, dict[str, Any]] = {
        200: {"content": content, "description": "The answer, in chunks with stream: true."}
    }

    @router.post("/v1/completions", responses=answers)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue a text."""
        return await endpoints.answer("completions", body, request)

    @router.post("/v1/chat/completions", responses=answers)
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        """Answer the last message of a conversation."""
        return await endpoints.answer("chat", body, request)

    return router


@dataclass(frozen=True, slots=True)
class _Answering:
    generation: Generation
    usage: UsageCount
    writer: AnswerWriter


@dataclass(frozen=True, slots=True)
class _Endpoints:
    """The two that generate."""

    frontend: Frontend
    settings: HttpSettings
    share: QueueShare

    async def answer(self, endpoint: Endpoint, body: ApiRequest, request: Request) -> Response:
        model = self.frontend.check_model(body.model)
        answer_id = f"{'chatcmpl' if endpoint == 'chat' else 'cmpl'}-{uuid.uuid4().hex}"
        prepared = await self.frontend.prepare(
            body, answer_id, client_request_id=request.scope["request_id"]
        )
        generation = prepared.generation
        self._take_place(generation, request)
        writer = AnswerWriter(
            endpoint,
            answer_id,
            model,
            int(time.time()),
            prepared.usage,
            shown=Shown.of(body),
            prompts=prepared.prompts,
            words=self.frontend.codec.words,
        )
        answering = _Answering(generation, prepared.usage, writer)
        try:
            await while_connected(request, generation.start())
        except BaseException:
            generation.end()
            raise
        idle_seconds = self.settings.keep_alive_seconds
        if body.stream:
            return EventStream(_frames(answering, body, idle_seconds), generation.end)
        try:
            whole = await while_connected(request, _whole(answering, idle_seconds))
        finally:
            generation.end()
        return Response(whole, media_type="application/json")

    def _take_place(self, generation: Generation, request: Request) -> None:
        """Raises TooManyRequestsError when the client's key has its share of the queue."""
        key = request.scope["api_key"]
        if key is not None and len(self.settings.api_keys.digests) > 1:
            tokens = generation.num_prompt_tokens
            try:
                generation.place = self.share.enter(key, len(tokens), sum(tokens))
            except TooManyRequestsError:
                self.frontend.engine.metrics.counts.refused("queue_share")
                raise


async def _whole(answering: _Answering, idle_seconds: float) -> bytes:
    generation = answering.generation
    by_choice: list[list[Piece]] = [[] for _ in generation.num_prompt_tokens]
    try:
        async for pieces in generation.pieces(idle_seconds):
            for piece in pieces:
                answering.usage.add(piece)
                by_choice[piece.index].append(piece)
        choices = [joined(pieces) for pieces in by_choice]
        num_rated = sum(_num_rated(choice) for choice in choices)
        return await _written(num_rated, answering.writer.whole, choices)
    except Exception:
        generation.fail()
        raise


async def _frames(
    answering: _Answering, body: ApiRequest, keep_alive_seconds: float
) -> AsyncGenerator[bytes, None]:
    """The events of a stream. An error after the headers is an event too; `[DONE]` ends all."""
    options = body.stream_options
    with_usage = options is not None and bool(options.continuous_usage_stats)
    try:
        async for pieces in answering.generation.pieces(keep_alive_seconds):
            frames = b"" if pieces else KEEP_ALIVE
            for piece in pieces:
                answering.usage.add(piece)
                chunks = partial(answering.writer.chunks, with_usage=with_usage)
                frames += await _written(_num_rated(piece), chunks, piece)
            if frames:
                yield frames
        if options is not None and options.include_usage:
            yield answering.writer.usage_chunk()
    except Exception as error:
        answering.generation.fail()
        if not isinstance(error, ApiError):
            logger.exception("a stream failed")
            error = our_fault()
        yield frame(error.body())
    yield DONE


def _num_rated(piece: Piece) -> int:
    return len(piece.logprobs) + len(piece.prompt_logprobs)


async def _written(num_rated: int, write: Callable[[W], bytes], what: W) -> bytes:
    """What `write` makes of `what`; in a thread when that takes long, so that others go on."""
    if num_rated < _MANY_RATED_TOKENS:
        return write(what)
    return await asyncio.to_thread(write, what)


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes away.

    Raises ClientGoneError then.
    """
    working = asyncio.create_task(work)
    gone = asyncio.create_task(disconnected(request.receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)
