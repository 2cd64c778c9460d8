"""Set-up and CI entry, tried with stand-ins for Python and make."""

import os
import shutil
import stat
import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]

PYTHON_WITH_BROKEN_PIP = """\
#!/bin/sh
# `python -c …` says it is new enough; `python -m venv DIR` gives DIR a python that fails.
[ "$1" = -c ] && exit 0
mkdir -p "$3/bin"
printf '#!/bin/sh\\nexit 1\\n' > "$3/bin/python"
chmod +x "$3/bin/python"
"""


def write_script(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(REPOSITORY / name, folder / name)
    without_make = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL")}
    return subprocess.run(
        ["make", *arguments],
        cwd=folder,
        env=without_make,
        capture_output=True,
        text=True,
        check=False,
    )


def test_an_old_or_missing_python_is_told_in_one_sentence(tmp_path: Path) -> None:
    old = write_script(tmp_path / "old-python", "#!/bin/sh\nexit 1\n")
    for python in (str(old), "no-such-python"):
        result = make(tmp_path, "setup", f"PYTHON={python}")
        assert result.returncode == 2
        assert result.stderr.startswith("Palimpsest needs Python 3.11 or newer")
        assert not (tmp_path / ".venv").exists()


def test_a_setup_that_fails_is_not_taken_for_done(tmp_path: Path) -> None:
    python = write_script(tmp_path / "python", PYTHON_WITH_BROKEN_PIP)
    result = make(tmp_path, "setup", f"PYTHON={python}")
    assert result.returncode == 2
    assert (tmp_path / ".venv" / "bin" / "python").exists()
    assert not list((tmp_path / ".venv").glob(".stamp*"))


def test_help_is_the_default_and_lists_the_targets(tmp_path: Path) -> None:
    result = make(tmp_path)
    assert result.returncode == 0
    for target in ("check", "test", "test-full", "clean", "setup"):
        assert f"make {target} " in result.stdout


def ci_run(checkout: Path, **environment: str) -> str:
    """What `make` was called with, and the variables it saw."""
    tools = checkout / "tools"
    tools.mkdir()
    write_script(tools / "make", '#!/bin/sh\necho "$* CI=$CI data=$PALIMPSEST_TEST_DATA in $PWD"\n')
    (checkout / ".ci").mkdir()
    shutil.copy(REPOSITORY / ".ci" / "run", checkout / ".ci" / "run")
    path = f"{tools}:{os.environ['PATH']}"
    result = subprocess.run(
        [checkout / ".ci" / "run"],
        cwd="/",
        env={"PATH": path, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout.strip()


def test_ci_takes_the_test_data_beside_the_checkout(tmp_path: Path) -> None:
    checkout, data = tmp_path / "checkout", tmp_path / "shared" / "data"
    checkout.mkdir()
    data.mkdir(parents=True)
    assert ci_run(checkout) == f"--no-print-directory test CI=true data={data} in {checkout}"


def test_ci_runs_without_test_data(tmp_path: Path) -> None:
    assert ci_run(tmp_path).endswith(f"CI=true data= in {tmp_path}")


def test_ci_keeps_the_test_data_it_was_given(tmp_path: Path) -> None:
    (tmp_path / "checkout").mkdir()
    (tmp_path / "shared" / "data").mkdir(parents=True)
    output = ci_run(tmp_path / "checkout", PALIMPSEST_TEST_DATA="elsewhere")
    assert "data=elsewhere " in output
