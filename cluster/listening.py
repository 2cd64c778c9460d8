"""How Serve listens: what stands before everything else, and how a replica binds its port."""

import socket
from typing import Any

from starlette.middleware import Middleware

from cluster.asgi import HeaderFilter


def middlewares() -> list[Middleware]:
    """For all processes of Serve that listen, in whose environment
    `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH` names this function."""
    return [Middleware(HeaderFilter)]


def take_over_ports() -> None:
    """Let this process bind a port on which another server has just ended. Call it once, before
    Serve starts to listen.

    Serve binds without SO_REUSEADDR, and connections that the server was the first to close keep a
    port for a minute: neither could a crashed replica be replaced nor a stopped server be started
    again until then. A port on which somebody listens is still refused.
    """
    from ray.serve._private import http_util, replica

    start = replica.start_asgi_http_server

    async def start_reusing(*arguments: Any, **options: Any) -> Any:
        return await start(*arguments, **{**options, "enable_so_reuseport": True})

    # Not SO_REUSEPORT too, with which two servers would share a port without a word.
    http_util.set_socket_reuse_port = _reuse_address
    replica.start_asgi_http_server = start_reusing


def _reuse_address(listener: socket.socket) -> bool:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return True
