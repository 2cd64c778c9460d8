"""Who needs a key."""

import asyncio
from typing import Any

import pytest

from cluster.asgi import Gate, KeyDigests


def status_of(path: str, *, root_path: str = "", key: str | None = None) -> int:
    """What a request gets, through a guard with the one key `right`."""
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b""}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
    scope = {"type": "http", "path": path, "root_path": root_path, "headers": headers}
    gate = Gate(app, KeyDigests.of(["right"]), admin_key=KeyDigests(), admin_paths=frozenset())
    asyncio.run(gate(scope, receive, send))
    status: int = sent[0]["status"]
    return status


@pytest.mark.parametrize("root_path", ["", "/chat"])
def test_probes_need_no_key_wherever_the_application_is_mounted(root_path: str) -> None:
    for path in ("/health", "/ready", "/metrics"):
        assert status_of(root_path + path, root_path=root_path) == 200
    for path in ("/v1/models", "/v1/completions", "/", "/ready/", "/x/ready"):
        assert status_of(root_path + path, root_path=root_path) == 401
        assert status_of(root_path + path, root_path=root_path, key="wrong") == 401
        assert status_of(root_path + path, root_path=root_path, key="right") == 200
