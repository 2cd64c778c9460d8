"""One server for all tests that only talk to it; tests that change something start their own."""

from collections.abc import Iterator

import httpx
import pytest

from tests.support.asking import CHAT, COMPLETIONS
from tests.support.http_server import HttpServer, http_server


@pytest.fixture(scope="session")
def server() -> Iterator[HttpServer]:
    with http_server() as running:
        yield running


@pytest.fixture
def http(server: HttpServer) -> Iterator[httpx.Client]:
    """A client of that server, which must be idle again at the end of the test."""
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client
    server.wait_idle()


@pytest.fixture(params=[COMPLETIONS, CHAT])
def path(request: pytest.FixtureRequest) -> str:
    path: str = request.param
    return path
