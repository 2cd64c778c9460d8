"""What all tests share: where large test data lies, and that nothing is skipped in CI."""

import os
import secrets
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.leftovers import RUN_VARIABLE, wait_for_run_to_end
from tests.support.ray_cluster import set_environment

# Before any test module imports Ray.
set_environment()

# How long an example takes says more about the machine's other work than about our code.
settings.register_profile("palimpsest", deadline=None)
settings.load_profile("palimpsest")

TEST_DATA_VARIABLE = "PALIMPSEST_TEST_DATA"


@pytest.fixture(scope="session")
def test_data_dir() -> Path | None:
    """The folder of data too large for the repository; None where there is none."""
    folder = os.environ.get(TEST_DATA_VARIABLE)
    if not folder:
        return None
    path = Path(folder)
    if not path.is_dir():
        pytest.fail(f"{TEST_DATA_VARIABLE} is {folder}, which is no folder.")
    return path


def pytest_configure(config: pytest.Config) -> None:
    if not _is_xdist_worker(config):
        os.environ[RUN_VARIABLE] = secrets.token_hex(16)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # One process runs all that needs Ray, one after the other: the sooner it begins, the sooner
    # the run is over.
    items.sort(key=lambda item: "integration" not in item.path.parts)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None]:
    """The last thing of the whole run: nothing of it may live on, also with another parent."""
    yield
    if _is_xdist_worker(session.config):
        return
    left = wait_for_run_to_end()
    if left:
        print("\nThese processes of the test run live on:", *left, sep="\n  ")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _is_xdist_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if item.get_closest_marker("gpu") is None:
        _forbid_skip_in_ci(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    # Also for GPU tests: a module that skips itself has no markers yet, so these use `skipif`.
    report = yield
    _forbid_skip_in_ci(report)
    return report


def _forbid_skip_in_ci(report: pytest.TestReport | pytest.CollectReport) -> None:
    """A test that silently stops running looks like one that passes."""
    expected_failure = hasattr(report, "wasxfail")
    if os.environ.get("CI") == "true" and report.skipped and not expected_failure:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{reason} (in CI only tests marked `gpu` may be skipped)"
