"""The routes of `palimpsest chaos`; they are there only when it is enabled, with the admin key."""

from dataclasses import asdict
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from cluster.api_errors import InvalidRequestError, UnavailableError
from cluster.errors import EngineUnavailableError
from cluster.generation import UNAVAILABLE_RETRY_SECONDS
from cluster.operations import Operations, UnknownProcessError
from cluster.supervisor_view import AppStatus

CHAOS_PATHS = frozenset({"/chaos"})
MAX_STALL_SECONDS = 3600


class StrikeRequest(BaseModel):
    """Kill a process, or stop it for a while."""

    model_config = ConfigDict(extra="forbid", strict=True)

    action: Literal["kill", "stall"]
    process: str = Field(max_length=100)
    """A name as `GET /chaos` tells it."""
    seconds: float = Field(0, ge=0, le=MAX_STALL_SECONDS)
    """How long it is stalled."""


def chaos_routes(operations: Operations) -> APIRouter:
    router = APIRouter(tags=["administration"])

    @router.get("/chaos")
    async def processes() -> dict[str, Any]:
        """The processes that can be struck, and how the engine came back so far."""
        try:
            return _as_json(await operations.status())
        except EngineUnavailableError as error:
            raise _unavailable(error) from error

    @router.post("/chaos")
    async def strike(body: StrikeRequest) -> dict[str, Any]:
        """Kill a process, or stall it; answered when that is over, if anybody is left to."""
        try:
            struck = await operations.strike(body.process, body.action, body.seconds)
        except UnknownProcessError as error:
            raise InvalidRequestError(f"{error}.", param="process") from error
        except EngineUnavailableError as error:
            raise _unavailable(error) from error
        return asdict(struck)

    return router


def _unavailable(error: EngineUnavailableError) -> UnavailableError:
    return UnavailableError(str(error), retry_after_seconds=UNAVAILABLE_RETRY_SECONDS)


def _as_json(status: AppStatus) -> dict[str, Any]:
    """What chaos is told of an application."""
    return {
        "state": str(status.info.state),
        "processes": list(status.processes),
        "num_recoveries": status.num_recoveries,
        "recoveries": [
            {
                "replaced": list(recovery.replaced),
                "reason": recovery.reason,
                "noticed_seconds": recovery.noticed_seconds,
                "joined_seconds": recovery.joined_seconds,
            }
            for recovery in status.recoveries
        ],
    }
