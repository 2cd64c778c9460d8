"""A server that answers as a test says."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from aiohttp import web


@contextmanager
def scripted_server(
    answer: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
) -> Iterator[str]:
    """Its URL, while it runs in a thread of its own. `answer` gets whatever is asked."""
    loop = asyncio.new_event_loop()
    runner = web.ServerRunner(web.Server(answer, handler_cancellation=True, loop=loop))
    loop.run_until_complete(runner.setup())
    loop.run_until_complete(web.TCPSite(runner, "127.0.0.1", 0).start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def send_stream(request: web.BaseRequest, *pieces: bytes) -> web.StreamResponse:
    """Answer with events, as they are."""
    await request.read()
    stream = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await stream.prepare(request)
    for piece in pieces:
        await stream.write(piece)
    return stream
