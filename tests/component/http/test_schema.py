"""Requests drawn from our own OpenAPI description, and from its neighbourhood: whatever they hold,
they cost their sender an error at most."""

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from cluster.asgi import KeyDigests
from cluster.http_settings import HttpSettings
from tests.support.http_server import HttpServer
from tests.support.served_model import model_server

MAX_TOKENS = 4
MAX_ERROR_BYTES = 64 << 10
ADMIN_KEY = "admin-key"


@pytest.fixture(scope="module")
def described(model: Any) -> Iterator[HttpServer]:
    http = HttpSettings(admin_key=KeyDigests.of([ADMIN_KEY]), keep_alive_seconds=0.5)
    with model_server(model, settings=http) as server:
        yield server
        server.wait_idle()


CHECKS = (content_type_conformance, response_schema_conformance, status_code_conformance)
QUIET = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


def clamped(body: Any) -> Any:
    """A body that is as wrong as before, and costs little if it is not wrong."""
    if not isinstance(body, dict):
        return body
    small = {"max_tokens": MAX_TOKENS, "max_completion_tokens": MAX_TOKENS, "n": 2}
    limits = {name: limit for name, limit in small.items() if isinstance(body.get(name), int)}
    more = {name: min(body[name], limit) for name, limit in limits.items()}
    return {"max_tokens": MAX_TOKENS, **body, **more}


def check(case: Any) -> None:
    case.body = clamped(case.body)
    answer = case.call(headers={"authorization": f"Bearer {ADMIN_KEY}"})
    assert answer.status_code < 500 or answer.status_code == 503, answer.text
    if answer.status_code >= 400:
        assert len(answer.content) <= MAX_ERROR_BYTES
    case.validate_response(answer, checks=CHECKS)


def check_all(server: HttpServer, **options: Any) -> None:
    """Draw requests for each operation: half of them as described, half nearly so."""
    description = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = []
    for found in description.get_all_operations():
        assert isinstance(found, Ok), found
        operations.append(found.ok())
    assert {"/v1/completions", "/abort", "/health"} <= {operation.path for operation in operations}
    for operation in operations:
        for mode in GenerationMode:
            drawn = operation.as_strategy(generation_mode=mode)
            drawing = settings(suppress_health_check=QUIET, deadline=None, **options)
            run = drawing(given(drawn)(check))
            try:
                run()
            except Unsatisfiable:
                continue  # there is no wrong way to ask
    server.wait_idle()


def test_a_few(described: HttpServer) -> None:
    check_all(described, max_examples=10, derandomize=True)


@pytest.mark.full
def test_many(described: HttpServer) -> None:
    check_all(described, max_examples=80)
