"""The HTTP API as an ASGI application; knows nothing of Ray."""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp

from cluster.answers import DONE, KEEP_ALIVE, AnswerWriter, UsageCount, frame
from cluster.api_errors import (
    ApiError,
    InternalError,
    TooManyRequestsError,
    from_status,
    from_validation,
)
from cluster.asgi import Guard, KeyDigests
from cluster.choice import Piece
from cluster.event_stream import EventStream, disconnected
from cluster.frontend import Frontend
from cluster.generation import Generation
from cluster.metrics_route import add_metrics_route
from cluster.openai_api import (
    ApiRequest,
    ChatCompletionRequest,
    CompletionRequest,
    Endpoint,
)
from cluster.queue_share import QueueShare
from configs.sections import MetricsCompat
from scheduler.messages import EngineState

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """What the HTTP side can be told. Survives pickling, and holds no key."""

    api_keys: KeyDigests = field(default_factory=KeyDigests)
    sends_request_id: bool = True
    """Off behind a proxy that adds the header `x-request-id` itself, as Ray Serve's does."""
    keep_alive_seconds: float = 10.0
    """After so long without news a stream says that it is still there."""
    max_waiting_requests: int = 2048
    max_waiting_tokens: int = 4_000_000
    """Of the whole queue; with several keys each may have half of it."""
    metrics_compat: MetricsCompat = "none"
    """Whose names `/metrics` speaks besides our own."""


def build_http_app(frontend: Frontend, settings: HttpSettings) -> ASGIApp:
    """The application of one replica."""
    app = FastAPI(title="Palimpsest", version=version("palimpsest"))
    share = QueueShare(settings.max_waiting_requests // 2, settings.max_waiting_tokens // 2)
    endpoints = _Endpoints(frontend, settings, share)
    _add_error_handlers(app)
    _add_probes(app, frontend)
    _add_models(app, frontend)
    add_metrics_route(app, frontend, settings.metrics_compat)

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await endpoints.answer("completions", body, request)

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        return await endpoints.answer("chat", body, request)

    return Guard(app, settings.api_keys, sends_request_id=settings.sends_request_id)


# -- completions ----------------------------------------------------------------------------


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
        generation, usage = await self.frontend.prepare(body, answer_id)
        self._take_place(generation, request)
        writer = AnswerWriter(endpoint, answer_id, model, int(time.time()), usage)
        answering = _Answering(generation, usage, writer)
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
    num_choices = len(answering.generation.num_prompt_tokens)
    texts: list[list[str]] = [[] for _ in range(num_choices)]
    last_pieces: dict[int, Piece] = {}
    async for pieces in answering.generation.pieces(idle_seconds):
        for piece in pieces:
            answering.usage.add(piece)
            texts[piece.index].append(piece.text)
            last_pieces[piece.index] = piece
    return answering.writer.whole(
        ["".join(parts) for parts in texts], [last_pieces[i] for i in range(num_choices)]
    )


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
                frames += answering.writer.chunks(piece, with_usage=with_usage)
            if frames:
                yield frames
        if options is not None and options.include_usage:
            yield answering.writer.usage_chunk()
    except ApiError as error:
        yield frame(error.body())
    except Exception:
        logger.exception("a stream failed")
        yield frame(_our_fault().body())
    yield DONE


class ClientGoneError(Exception):
    """Nobody is there any more to be answered."""


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


# -- everything else ------------------------------------------------------------------------


def _add_probes(app: FastAPI, frontend: Frontend) -> None:
    @app.get("/health")
    async def health() -> Response:
        """Alive: 200 until the engine is given up."""
        info = frontend.engine.info()
        is_alive = info.state is not EngineState.FAILED
        content = {"status": str(info.state), "reason": info.reason or None}
        return JSONResponse(content, 200 if is_alive else 503)

    @app.get("/ready")
    async def ready() -> Response:
        """Whether a token can be made now, and if not why."""
        info = frontend.engine.info()
        content = {"status": str(info.state), "reason": info.reason or None}
        return JSONResponse(content, 200 if info.is_ready else 503)

    @app.get("/version")
    async def tell_version() -> dict[str, str]:
        return {"version": version("palimpsest")}


def _add_models(app: FastAPI, frontend: Frontend) -> None:
    created_seconds = int(time.time())

    def card(name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": created_seconds,
            "owned_by": "palimpsest",
            "root": frontend.model_names[0],
            "max_model_len": frontend.engine.info().max_model_len or None,
        }

    @app.get("/v1/models")
    async def models() -> dict[str, object]:
        return {"object": "list", "data": [card(name) for name in frontend.model_names]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, object]:
        return card(frontend.check_model(name))


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return JSONResponse(error.body(), error.status, error.headers)

    @app.exception_handler(RequestValidationError)
    async def validation_error(request: Request, error: RequestValidationError) -> Response:
        return await api_error(request, from_validation(error.errors()))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        found = from_status(error.status_code, str(error.detail), request.url.path)
        return JSONResponse(found.body(), found.status, {**found.headers, **(error.headers or {})})

    @app.exception_handler(ClientGoneError)
    async def client_gone(request: Request, error: ClientGoneError) -> Response:
        return Response(status_code=499)  # for the log alone

    @app.exception_handler(Exception)
    async def other(request: Request, error: Exception) -> Response:
        return await api_error(request, _our_fault())


def _our_fault() -> ApiError:
    return InternalError("The server made a mistake; its log tells more.")
