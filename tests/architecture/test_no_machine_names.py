"""The repository names no path of the machine it was written on, and no package index."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

# Put together from parts, so that this file does not contain what it looks for.
MACHINE_FOLDERS = "|".join(["home", "mnt", "opt", "root", "tmp", "Users", "work"])
FORBIDDEN = {
    "machine path": re.compile(rf"(?<![\w./~$}}-])/(?:{MACHINE_FOLDERS})(?=[/\s\"'`,;:)]|$)"),
    "package index": re.compile(
        "|".join(["index" + "-url", "find" + "-links", r"https?://[^/\s]+/" + r"simple\b"])
    ),
}


def repository_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    paths = [REPOSITORY / name for name in listed.stdout.split("\0") if name]
    return [path for path in paths if path.is_file()]


def forbidden_names(text: str, name: str) -> Iterator[str]:
    for line_number, line in enumerate(text.splitlines(), 1):
        for what, pattern in FORBIDDEN.items():
            if found := pattern.search(line):
                yield f"{name}:{line_number}: {what} {found.group()}"


def test_no_file_names_a_machine_path_or_package_index() -> None:
    found: list[str] = []
    for path in repository_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # not a text
        found += forbidden_names(text, str(path.relative_to(REPOSITORY)))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "cd /{}/main",
        'Path("/{}")',
        "see `/{}/data`.",
    ],
)
@pytest.mark.parametrize("folder", MACHINE_FOLDERS.split("|"))
def test_machine_paths_are_found(line: str, folder: str) -> None:
    assert list(forbidden_names(line.format(folder), "x"))


@pytest.mark.parametrize(
    "line",
    ["pip install --index" + "-url x", "https://host.example/" + "simple/", "--find" + "-links x"],
)
def test_package_indexes_are_found(line: str) -> None:
    assert list(forbidden_names(line, "x"))


@pytest.mark.parametrize(
    "line",
    ["https://example.org/work/", "network/work/queue", "/v1/models", "/workers", "$HOME/tmp/x"],
)
def test_other_paths_are_not(line: str) -> None:
    assert not list(forbidden_names(line, "x"))
