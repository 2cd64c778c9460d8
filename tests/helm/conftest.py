"""Helm, fetched once, and the cases of the chart, each rendered once."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.support import kubernetes_tools
from tests.support.chart import Rendered


@pytest.hookimpl(tryfirst=True)  # xdist reads the mark
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # One process fetches the tools and renders; the others need not wait for it.
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("helm"))


@pytest.fixture(scope="session")
def helm() -> Path:
    found = kubernetes_tools.helm()
    if found is None:
        pytest.skip("there is no Helm on this machine, and none to fetch for it")
    return found


@pytest.fixture(scope="session")
def rendered(helm: Path) -> Callable[[str], Rendered]:
    return cache(lambda case: Rendered.of(helm, case))
