"""A port is taken over from a server that has ended, and from nobody else."""

import asyncio
import importlib
from typing import Any

import pytest

from cluster.listening import take_over_ports
from tests.support.serving import HOST, free_port


@pytest.fixture
def serve_replica(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of Serve that starts HTTP servers, as it is in a replica of ours."""
    http_util = importlib.import_module("ray.serve._private.http_util")
    replica = importlib.import_module("ray.serve._private.replica")
    # What is set here is what is undone at the end.
    monkeypatch.setattr(http_util, "set_socket_reuse_port", http_util.set_socket_reuse_port)
    monkeypatch.setattr(replica, "start_asgi_http_server", replica.start_asgi_http_server)
    take_over_ports()
    return replica


async def closing_app(scope: Any, receive: Any, send: Any) -> None:
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]}
    )
    await send({"type": "http.response.body", "body": b""})


# Serve leaves a socket that it could not bind to the garbage collector.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <socket.socket")
def test_only_a_port_on_which_nobody_listens_is_taken(serve_replica: Any) -> None:
    from ray.serve.config import HTTPOptions

    options = HTTPOptions(host=HOST, port=free_port())

    async def start() -> tuple[asyncio.Task[None], Any]:
        started: tuple[asyncio.Task[None], Any] = await serve_replica.start_asgi_http_server(
            closing_app, options, event_loop=asyncio.get_running_loop(), enable_so_reuseport=False
        )
        return started

    async def answer_and_end(task: asyncio.Task[None], server: Any) -> None:
        """The server is the first to close, so the kernel keeps the connection for a minute."""
        reader, writer = await asyncio.open_connection(HOST, options.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()
        server.should_exit = True
        await task

    async def run() -> None:
        for _ in range(2):
            task, server = await start()
            while not server.started:
                await asyncio.sleep(0.01)
            with pytest.raises(RuntimeError, match="Failed to bind"):
                await start()
            await answer_and_end(task, server)

    asyncio.run(run())
