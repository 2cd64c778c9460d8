"""`palimpsest config`, as people and scripts see it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.cli import main
from configs.settings import all_settings

CANARY = "canary-7f3a"


class Output:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def palimpsest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> "RunPalimpsest":
    monkeypatch.setenv("COLUMNS", "200")
    return RunPalimpsest(capsys, monkeypatch)


class RunPalimpsest:
    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys, self._monkeypatch = capsys, monkeypatch

    def __call__(self, *arguments: str) -> Output:
        self._monkeypatch.setattr(sys, "argv", ["palimpsest", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = self._capsys.readouterr()
        code = ended.value.code
        return Output(code if isinstance(code, int) else 0, out, err)


def test_it_prints_values_sources_and_meanings(palimpsest: RunPalimpsest) -> None:
    output = palimpsest("config", "--set", "cache.num_blocks=4096")
    assert (output.code, output.err) == (0, "")
    for setting in all_settings().values():
        assert setting.key in output.out
    (row,) = [line for line in output.out.splitlines() if line.startswith("  num_blocks ")]
    assert row.split()[1:3] == ["4096", "--set"]
    assert "64 on cpu, 256 on cuda" in output.out


def test_json_holds_all_settings_for_a_device(palimpsest: RunPalimpsest, tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("cache:\n  block_size: 32\n")
    output = palimpsest("config", "--config", str(path), "--device", "cpu", "--json")
    assert output.code == 0
    answer = json.loads(output.out)
    assert answer["device"] == "cpu"
    assert set(answer["settings"]) == set(all_settings())
    assert answer["settings"]["cache.block_size"] == {
        "value": 32,
        "source": "file",
        "where": f"{path}:2",
    }
    assert answer["settings"]["scheduler.max_num_seqs"] == {
        "value": 64,
        "source": "default",
        "where": None,
    }


def test_keys_are_never_printed(palimpsest: RunPalimpsest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PALIMPSEST_API_KEYS", f"{CANARY}-1,{CANARY}-2")
    monkeypatch.setenv("PALIMPSEST_ADMIN_KEY", f"{CANARY}-3")
    for arguments in ([], ["--json"], ["--device", "cpu"]):
        output = palimpsest("config", *arguments)
        assert output.code == 0
        assert "2 set (not shown)" in output.out
        assert CANARY not in output.out + output.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--set", "cache.num_blocks=1"],
            "cache.num_blocks is 1 (--set), but must be a whole number from 2 to 16777216, or "
            "null.\n",
        ),
        (["--config", "no-such-file"], "Cannot read no-such-file: No such file or directory.\n"),
        (
            ["--set", "server.host=0.0.0.0"],
            "server.host is 0.0.0.0, which other machines can reach, and there is no API key: set "
            "PALIMPSEST_API_KEYS, or server.allow_no_auth to true if everybody there may use the "
            "server.\n",
        ),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    palimpsest: RunPalimpsest, arguments: list[str], message: str
) -> None:
    output = palimpsest("config", *arguments)
    assert (output.code, output.out, output.err) == (2, "", message)


def test_the_program_itself_ends_the_same_way() -> None:
    result = subprocess.run(
        [sys.executable, "-c", "from cluster.cli import main; main()", "config", "--set", "a.b=1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("a.b (--set) is unknown")
    assert result.stderr.count("\n") == 1


def test_help_teaches(palimpsest: RunPalimpsest) -> None:
    assert "palimpsest config --config my.yaml" in palimpsest("config", "--help").out
    assert "Print every setting" in palimpsest("--help").out
    assert palimpsest("--version").out == "0.1.0\n"
