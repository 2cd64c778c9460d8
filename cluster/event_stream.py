"""Server-sent events to one client: in time, within bounds, and with a clear end."""

import asyncio
from collections.abc import AsyncGenerator, Callable

from fastapi import Response
from starlette.types import Receive, Scope, Send

from scheduler.messages import EndReason

SEND_SECONDS = 60.0
"""How long a client may take to read what is in the buffers before it."""


class EventStream(Response):
    """An answer that comes in frames."""

    media_type = "text/event-stream"

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        on_end: Callable[[EndReason], None],
    ) -> None:
        """`on_end` is called once, whatever the end is: all frames sent, the client gone or too
        slow, or the request cancelled."""
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._frames = frames
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reason = EndReason.ABORT
        sending = asyncio.create_task(self._send(send))
        gone = asyncio.create_task(disconnected(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        except TimeoutError:
            reason = EndReason.SLOW_CLIENT
        except OSError:
            pass  # the client is gone, and the socket knew it first
        finally:
            # First, because each wait from here on may be cancelled.
            self._on_end(reason)
            gone.cancel()
            sending.cancel()
            await asyncio.gather(sending, gone, return_exceptions=True)
            await self._frames.aclose()

    async def _send(self, send: Send) -> None:
        """Raises TimeoutError when the client does not read."""
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async for frames in self._frames:
            async with asyncio.timeout(SEND_SECONDS):
                await send({"type": "http.response.body", "body": frames, "more_body": True})
        async with asyncio.timeout(SEND_SECONDS):
            await send({"type": "http.response.body", "body": b""})


async def disconnected(receive: Receive) -> None:
    """Returns when the client is gone. The body of the request must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
