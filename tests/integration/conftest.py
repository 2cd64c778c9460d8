"""One local Ray cluster for all integration tests of a process, and nothing left of it; on it Ray
Serve, a model, and names for engines, for those that want them."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.engines import stop
from tests.support.faulty_rank import LOADER
from tests.support.leftovers import Leftovers, assert_nothing_left
from tests.support.ray_cluster import local_ray
from tests.support.references import stories_directory
from tests.support.served_model import ready_to_serve
from tests.support.serving import ADMIN_KEY, ORIGIN, App, deployed, free_port, serve_on


@pytest.hookimpl(tryfirst=True)  # xdist reads the mark
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # A cluster takes ten seconds to start, so one process has all that share it; what starts its
    # own is a group by itself.
    for item in items:
        is_ours = Path(__file__).parent in item.path.parents
        if is_ours and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group("ray"))
    # Serve and an application cost something also while nobody asks them: they come last.
    items.sort(key=_num_shared)


def _num_shared(item: pytest.Item) -> int:
    names = getattr(item, "fixturenames", ())
    return sum(name in names for name in ("port", "roomy"))


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A connection to a Ray cluster of one node, of which nothing may be left at the end."""
    before = Leftovers.now()
    with local_ray():
        yield
    assert_nothing_left(before)


@pytest.fixture(scope="session")
def port(ray_cluster: None) -> Iterator[int]:
    """Where Ray Serve listens on that cluster: its start and its end take some seconds."""
    port = free_port()
    with serve_on(port):
        yield port


@pytest.fixture(scope="session")
def model(test_data_dir: Path | None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model that tells stories, ready to serve. Some modules have another."""
    folder = tmp_path_factory.mktemp("stories")
    return ready_to_serve(stories_directory(test_data_dir, folder), folder)


@pytest.fixture(scope="session")
def roomy(port: int, model: Path) -> Iterator[App]:
    """An application with room for everybody, and with all that a server can be told. Whoever asks
    it leaves it idle."""
    overrides = (
        f"model.model={model}",
        "model.served_model_name=[first, second]",
        "cache.num_blocks=2000",
        "server.log_format=json",
        f"server.allowed_origins={ORIGIN}",
    )
    environ = {"PALIMPSEST_ADMIN_KEY": ADMIN_KEY}
    with deployed("roomy", port, *overrides, environ=environ, loader=LOADER) as app:
        yield app


@pytest.fixture
def app(ray_cluster: None, request: pytest.FixtureRequest) -> Iterator[str]:
    """A name for an engine of the test's own, which ends with it."""
    name = request.node.name
    yield name
    asyncio.run(stop(name))
