"""Memory that a crowd of requests has needed, given back when the crowd is gone."""

import asyncio
import ctypes
from collections.abc import Callable

_LOOK_SECONDS = 1.0


def trim_heap() -> None:
    """Give the free pages of this process's C heap back to the system; takes milliseconds.

    glibc keeps them, and each crowd leaves its free pieces elsewhere, so that a process would seem
    to grow for ever. Other C libraries are left alone.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


async def trim_when_idle(
    is_busy: Callable[[], bool],
    trim: Callable[[], None] = trim_heap,
    look_seconds: float = _LOOK_SECONDS,
) -> None:
    """Call `trim` in a thread each time that two looks in a row find nothing to do after something
    was done. Runs until it is cancelled."""
    num_idle_looks = 2
    while True:
        await asyncio.sleep(look_seconds)
        num_idle_looks = 0 if is_busy() else num_idle_looks + 1
        if num_idle_looks == 2:
            await asyncio.to_thread(trim)
