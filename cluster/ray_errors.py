"""Ray's references and errors, as the rest of us want them."""

import asyncio
from typing import Any

import ray


async def awaited(reference: Any) -> Any:
    """The reference as a coroutine, of which asyncio can make a task."""
    return await reference


def sentence(error: BaseException | None) -> str:
    """What happened to a call, or to the process that ran it."""
    if error is None:
        return "it ended"
    if isinstance(error, ray.exceptions.RayTaskError):
        return sentence(error.cause)
    if isinstance(error, ray.exceptions.RayActorError):
        return "its process died"
    return f"{error}" or type(error).__name__


async def first_done(*futures: asyncio.Future[Any]) -> set[asyncio.Future[Any]]:
    """Those that are done when one is; the others are cancelled, and over."""
    try:
        done, _ = await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        return done
    finally:
        for future in futures:
            future.cancel()
        await asyncio.gather(*futures, return_exceptions=True)


def start_failure(error: Exception, limit_seconds: float) -> str:
    """Why a group could not form, within so many seconds."""
    if isinstance(error, ray.exceptions.RayActorError):
        return "a process of the engine died while it was being started"
    if isinstance(error, TimeoutError):
        return (
            f"the workers were not ready after {limit_seconds:.0f} s: raise "
            f"server.group_start_seconds if they only need longer"
        )
    return sentence(error)
