"""The HTTP API as an ASGI application; knows nothing of Ray."""

from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp

from cluster.admin_routes import ADMIN_PATHS, admin_routes
from cluster.api_errors import ApiError, ErrorBody, from_status, from_validation, our_fault
from cluster.asgi import ClientGoneError, Gate, Guard
from cluster.chaos_routes import CHAOS_PATHS, chaos_routes
from cluster.frontend import Frontend
from cluster.generation_routes import generation_routes
from cluster.http_settings import HttpSettings
from cluster.metrics_route import metrics_routes
from cluster.operations import Operations
from cluster.probe_routes import model_routes, probe_routes
from cluster.token_routes import token_routes

_ERRORS = {
    400: "The request is wrong; the message says what to change.",
    401: "The key is missing or wrong.",
    404: "There is no such model.",
    413: "The body is too large.",
    429: "Too much is waiting already.",
    500: "A fault of the server.",
    503: "No token can be made now.",
}


def build_http_app(
    frontend: Frontend, settings: HttpSettings, operations: Operations | None = None
) -> ASGIApp:
    """The application of one replica; `operations` are for chaos, where that is enabled.

    request ──► Guard: its id ──► CORS ──► Gate: key, size ──► routes
    """
    responses: dict[int | str, dict[str, Any]] = {
        status: {"model": ErrorBody, "description": text} for status, text in _ERRORS.items()
    }
    # With a default FastAPI leaves its own 422 out, which is a 400 here.
    responses["default"] = {"model": ErrorBody, "description": "Any other error."}
    app = FastAPI(title="Palimpsest", version=version("palimpsest"), responses=responses)
    _add_error_handlers(app)
    app.include_router(generation_routes(frontend, settings))
    app.include_router(model_routes(frontend))
    app.include_router(token_routes(frontend))
    app.include_router(probe_routes(frontend))
    app.include_router(metrics_routes(frontend, settings.metrics_compat))
    admin_paths: frozenset[str] = frozenset()
    if settings.admin_key:
        app.include_router(admin_routes(frontend.engine))
        admin_paths = ADMIN_PATHS
        if operations is not None:
            app.include_router(chaos_routes(operations))
            admin_paths |= CHAOS_PATHS
    gated: ASGIApp = Gate(
        app, settings.api_keys, admin_key=settings.admin_key, admin_paths=admin_paths
    )
    if settings.allowed_origins:
        gated = CORSMiddleware(
            gated,
            allow_origins=settings.allowed_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("x-request-id", "retry-after"),
        )
    return Guard(
        gated,
        sends_request_id=settings.sends_request_id,
        on_answer=frontend.engine.metrics.counts.answered,
    )


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
        return Response(status_code=error.status_code)

    @app.exception_handler(Exception)
    async def other(request: Request, error: Exception) -> Response:
        return await api_error(request, our_fault())
