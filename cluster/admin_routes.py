"""Routes for whoever runs the server; they are there only with a key of their own."""

from fastapi import APIRouter

from cluster.api_errors import InvalidRequestError, UnavailableError
from cluster.engine_client import EngineClient
from cluster.errors import EngineBusyError, EngineUnavailableError
from cluster.generation import UNAVAILABLE_RETRY_SECONDS
from cluster.openai_api import AbortRequest

ADMIN_PATHS = frozenset({"/reset_prefix_cache", "/abort"})


def admin_routes(engine: EngineClient) -> APIRouter:
    router = APIRouter(tags=["administration"])

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> dict[str, bool]:
        """Forget all cached prefixes; refused while requests hold blocks."""
        try:
            await engine.reset_prefix_cache()
        except EngineBusyError as error:
            raise InvalidRequestError(
                f"The prefix cache can be reset only while nothing runs: {error}.", code="busy"
            ) from error
        except EngineUnavailableError as error:
            raise _unavailable(error) from error
        return {"reset": True}

    @router.post("/abort")
    async def abort(body: AbortRequest) -> dict[str, int]:
        """End requests by the ids of their answers, or all that carry an `x-request-id`."""
        try:
            return {"aborted": await engine.abort(body.request_ids)}
        except EngineUnavailableError as error:
            raise _unavailable(error) from error

    return router


def _unavailable(error: EngineUnavailableError) -> UnavailableError:
    return UnavailableError(str(error), retry_after_seconds=UNAVAILABLE_RETRY_SECONDS)
