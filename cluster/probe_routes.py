"""What the server says of itself: whether it is alive and ready, its load, its models."""

import time
from importlib.metadata import version

from fastapi import APIRouter, Response
from starlette.responses import JSONResponse

from cluster.frontend import Frontend
from scheduler.messages import EngineState


def probe_routes(frontend: Frontend) -> APIRouter:
    router = APIRouter(tags=["server"])

    @router.get("/health")
    async def health() -> Response:
        """Alive: 200 until the engine is given up."""
        info = frontend.engine.info()
        is_alive = info.state is not EngineState.FAILED
        content = {"status": str(info.state), "reason": info.reason or None}
        return JSONResponse(content, 200 if is_alive else 503)

    @router.get("/ready")
    async def ready() -> Response:
        """Whether a token can be made now, and if not why."""
        info = frontend.engine.info()
        content = {"status": str(info.state), "reason": info.reason or None}
        return JSONResponse(content, 200 if info.is_ready else 503)

    @router.get("/version")
    async def tell_version() -> dict[str, str]:
        return {"version": version("palimpsest")}

    @router.get("/load")
    async def load() -> dict[str, float]:
        """How busy the engine is, over all replicas, a moment ago."""
        info = frontend.engine.info()
        return {
            "server_load": info.running_requests + info.waiting_requests,
            "running_requests": info.running_requests,
            "waiting_requests": info.waiting_requests,
            "waiting_tokens": info.waiting_tokens,
            "tokens_per_second": info.tokens_per_second,
            "capacity_tokens": info.capacity_tokens,
        }

    return router


def model_routes(frontend: Frontend) -> APIRouter:
    router = APIRouter(tags=["models"])
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

    @router.get("/v1/models")
    async def models() -> dict[str, object]:
        return {"object": "list", "data": [card(name) for name in frontend.model_names]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, object]:
        frontend.check_model(name)
        return card(name)

    return router
