"""The small trained model over real HTTP, in this process: once with room for everybody, and as
often as a test likes with a pool far too small."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import pytest

from configs import CacheConfig, Config, SchedulerConfig
from tests.support.http_server import HttpServer
from tests.support.served_model import model_server, ready_to_serve

TightServer: TypeAlias = Callable[..., AbstractContextManager[HttpServer]]


# With something for each of the fields that a template can see.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}{{ ending }}"
    "{% if add_generation_prompt %} Then{% endif %}"
)


@pytest.fixture(scope="session")
def model(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = ready_to_serve(stories, tmp_path_factory.mktemp("served"))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return directory


@pytest.fixture(scope="session")
def roomy(model: Path) -> Iterator[HttpServer]:
    with model_server(model) as server:
        yield server


@pytest.fixture
def solo(roomy: HttpServer) -> Iterator[httpx.Client]:
    """A client of the server in which nobody is ever disturbed."""
    with httpx.Client(base_url=roomy.url, timeout=60) as client:
        yield client
    roomy.wait_idle()


@pytest.fixture
def squeezed(model: Path) -> TightServer:
    """`squeezed(num_blocks, **scheduler)`: a server whose pool has so many blocks to give out."""

    def serve(num_blocks: int, **scheduler: Any) -> AbstractContextManager[HttpServer]:
        step_seconds = scheduler.pop("step_seconds", 0.0)
        config = Config(
            cache=CacheConfig(num_blocks=num_blocks + 1), scheduler=SchedulerConfig(**scheduler)
        )
        return model_server(model, config, step_seconds=step_seconds)

    return serve
