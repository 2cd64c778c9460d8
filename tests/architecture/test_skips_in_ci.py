"""The hook in tests/conftest.py that turns skips into failures, run on tests of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"

TESTS = """\
import pytest

def test_passes():
    pass

def test_skips():
    pytest.skip("no reason")

@pytest.mark.skipif(True, reason="never")
def test_skips_by_mark():
    pass

@pytest.mark.gpu
def test_skips_without_gpu():
    pytest.skip("no GPU")

@pytest.mark.xfail
def test_fails_as_expected():
    raise AssertionError
"""

MODULE_THAT_SKIPS_ITSELF = """\
import pytest

pytest.skip("all of it", allow_module_level=True)
"""


def run_pytest(folder: Path, *, ci: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST.read_text())
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(folder)],
        # Plugins have no part in this, and importing them takes most of the time.
        env={**os.environ, "CI": ci, "PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_in_ci_a_skip_outside_gpu_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    result = run_pytest(tmp_path, ci="true")
    assert "1 failed, 1 passed, 1 skipped, 1 xfailed, 1 error" in result.stdout
    assert "no reason (in CI only tests marked `gpu` may be skipped)" in result.stdout
    assert result.returncode == pytest.ExitCode.TESTS_FAILED


def test_elsewhere_a_skip_is_a_skip(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    result = run_pytest(tmp_path, ci="false")
    assert "1 passed, 3 skipped, 1 xfailed" in result.stdout
    assert result.returncode == pytest.ExitCode.OK


@pytest.mark.parametrize(
    ("ci", "exit_code"), [("true", pytest.ExitCode.INTERRUPTED), ("", pytest.ExitCode.OK)]
)
def test_a_module_that_skips_itself(tmp_path: Path, ci: str, exit_code: int) -> None:
    (tmp_path / "test_it.py").write_text(MODULE_THAT_SKIPS_ITSELF)
    (tmp_path / "test_more.py").write_text("def test_passes():\n    pass\n")
    result = run_pytest(tmp_path, ci=ci)
    assert result.returncode == exit_code, result.stdout
