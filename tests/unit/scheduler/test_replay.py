"""Recorded decisions replayed through the real core, and recordings that are not usable."""

import copy
import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scheduler.__main__ import main
from scheduler.replay import Difference, first_difference, replay

ORACLE = Path(__file__).parents[2] / "data" / "oracle"
RECORDINGS = sorted(ORACLE.glob("*.json.gz"))

Recording = dict[str, Any]


def load(path: Path) -> Recording:
    recording: Recording = json.loads(gzip.decompress(path.read_bytes()))
    return recording


@pytest.fixture(scope="module")
def calm() -> Recording:
    return load(ORACLE / "calm_0.json.gz")


@pytest.fixture
def recording(calm: Recording) -> Recording:
    """One that may be changed."""
    return copy.deepcopy(calm)


def test_there_are_15_recordings() -> None:
    assert len(RECORDINGS) == 15


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name.split(".")[0])
def test_every_decision_is_the_recorded_one(path: Path) -> None:
    assert first_difference(load(path)) is None


def test_command_says_ok_for_each_file(capsys: pytest.CaptureFixture[str]) -> None:
    paths = [ORACLE / "calm_0.json.gz", ORACLE / "salt_0.json.gz"]
    assert main(["replay", *map(str, paths)]) == 0
    assert capsys.readouterr().out == "calm_0.json.gz: ok\nsalt_0.json.gz: ok\n"


def test_plain_json_is_read_too(recording: Recording, tmp_path: Path) -> None:
    path = tmp_path / "plain.json"
    path.write_text(json.dumps(recording))
    assert main(["replay", str(path)]) == 0


@pytest.mark.parametrize(
    "name", ["tight_fcfs_0", "priority_wide_0", "no_chunk_0", "one_group_full_hits_0"]
)
def test_json_is_the_recorded_trace(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = ORACLE / f"{name}.json.gz"
    assert main(["replay", "--json", str(path)]) == 0
    ours, recorded = json.loads(capsys.readouterr().out), load(path)
    for field in ("steps", "finished_steps", "totals"):
        assert ours[field] == recorded[field]
    assert len(ours["trace"]) == len(recorded["trace"])
    for got, expected in zip(ours["trace"], recorded["trace"], strict=True):
        assert {field: got[field] for field in expected} == expected


# -- differences ------------------------------------------------------------------------


def test_changed_decision_is_reported_with_step_field_expected_and_got(
    recording: Recording, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = recording["trace"][7]
    got = record["free"]
    record["free"] = got + 1
    assert first_difference(recording) == Difference(7, "free", got + 1, got)
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(recording))
    assert main(["replay", str(path)]) == 1
    assert capsys.readouterr().out == (
        f"changed.json: step 7, free: expected {got + 1}, got {got}\n"
    )


@pytest.mark.parametrize(
    "field", ["scheduled", "preempted", "new", "cached", "running", "waiting", "free"]
)
def test_change_in_any_field_is_found(recording: Recording, field: str) -> None:
    recording["trace"][3][field] = "something else"
    difference = first_difference(recording)
    assert difference is not None
    assert (difference.step, difference.field) == (3, field)


def test_first_of_two_differences_is_reported(recording: Recording) -> None:
    recording["trace"][9]["free"] += 1
    recording["trace"][4]["free"] += 1
    difference = first_difference(recording)
    assert difference is not None
    assert difference.step == 4


@pytest.mark.parametrize(
    "total",
    [
        "preemptions",
        "prefix_queries",
        "prefix_hits",
        "preempted_queries",
        "preempted_hits",
        "scheduled_tokens",
    ],
)
def test_changed_total_is_found(recording: Recording, total: str) -> None:
    recording["totals"][total] += 1
    difference = first_difference(recording)
    assert difference is not None
    assert (difference.step, difference.field) == (None, total)
    assert str(difference).startswith(f"total, {total}: expected ")


def test_changed_end_of_a_request_is_found(recording: Recording) -> None:
    name = next(iter(recording["finished_steps"]))
    recording["finished_steps"][name] += 1
    difference = first_difference(recording)
    assert difference is not None
    assert difference.field == "finished_steps"


@pytest.mark.parametrize("change", [-1, 1])
def test_trace_of_another_length_is_found(recording: Recording, change: int) -> None:
    trace = recording["trace"]
    num_steps = len(trace)
    recording["trace"] = trace[:-1] if change < 0 else [*trace, trace[-1]]
    difference = first_difference(recording)
    assert difference is not None
    assert (difference.field, difference.got) == ("steps", num_steps)


def test_one_different_file_does_not_hide_the_others(
    recording: Recording, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recording["trace"][0]["free"] += 1
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(recording))
    assert main(["replay", str(path), str(ORACLE / "calm_0.json.gz")]) == 1
    assert capsys.readouterr().out.splitlines()[1] == "calm_0.json.gz: ok"


def test_replaying_changes_nothing_in_the_recording(recording: Recording) -> None:
    before = copy.deepcopy(recording)
    replay(recording)
    assert recording == before


# -- what cannot be replayed ------------------------------------------------------------


def complaint(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that the command says about an unusable file."""
    assert main(["replay", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert str(path) in line
    assert len(line) > len(f"{path}: ")
    return line


def test_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "No such file" in complaint(tmp_path / "nowhere.json", capsys)


def test_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "directory" in complaint(tmp_path, capsys)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "must be a JSON object"),
        (b"7", "must be a JSON object"),
        (b"\x1f\x8b", ""),
        (gzip.compress(b"{}", mtime=0)[:-4], ""),
        (gzip.compress(b'{"workload": 1}', mtime=0).replace(b"\x08", b"\x09", 1), ""),
        (gzip.compress(b"{}", mtime=0)[:10] + b"\xff" * 20, ""),
        (b"{}", "missing required field `workload`"),
        (b'{"workload": []}', "$.workload"),
        (b'{"workload": {}}', "missing required field `requests`"),
    ],
)
def test_file_that_is_no_recording(
    data: bytes, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(data)
    assert says in complaint(path, capsys)


def set_in_workload(name: str, value: object) -> Callable[[Recording], None]:
    def change(recording: Recording) -> None:
        recording["workload"][name] = value

    return change


def set_in_request(name: str, value: object) -> Callable[[Recording], None]:
    def change(recording: Recording) -> None:
        recording["workload"]["requests"][0][name] = value

    return change


def drop_from_request(name: str) -> Callable[[Recording], None]:
    def change(recording: Recording) -> None:
        del recording["workload"]["requests"][0][name]

    return change


def drop(name: str) -> Callable[[Recording], None]:
    def change(recording: Recording) -> None:
        del recording[name]

    return change


def put(name: str, value: object) -> Callable[[Recording], None]:
    def change(recording: Recording) -> None:
        recording[name] = value

    return change


def repeat_an_id(recording: Recording) -> None:
    requests = recording["workload"]["requests"]
    requests[1]["id"] = requests[0]["id"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (set_in_workload("requests", 7), "format"),
        (set_in_workload("requests", [7]), "format"),
        (set_in_workload("block_size", 0), "block_size"),
        (set_in_workload("block_size", "16"), "block_size"),
        (set_in_workload("num_blocks", 1), "num_blocks"),
        (set_in_workload("num_blocks", "many"), "format"),
        (set_in_workload("max_num_seqs", 0), "max_num_seqs"),
        (set_in_workload("policy", "random"), "policy"),
        (set_in_workload("chunked_prefill", False), "max_num_batched_tokens"),
        (set_in_request("prompt", []), "prompt is empty"),
        (set_in_request("prompt", "words"), "format"),
        (set_in_request("prompt", [2**40]), "format"),
        (set_in_request("max_tokens", 0), "max_tokens must be at least 1"),
        (set_in_request("max_tokens", "all"), "format"),
        (set_in_request("arrival_step", "soon"), "format"),
        (set_in_request("arrival_step", -1), "arrival_step"),
        (set_in_request("tok_seed", None), "format"),
        (drop_from_request("tok_seed"), "tok_seed"),
        (drop_from_request("prompt"), "prompt"),
        (repeat_an_id, "twice"),
        (drop("trace"), "missing required field `trace`"),
        (drop("totals"), "missing required field `totals`"),
        (put("trace", 7), "format"),
        (put("trace", [7]), "format"),
        (put("totals", 7), "format"),
    ],
)
def test_recording_with_nonsense_inside(
    recording: Recording,
    change: Callable[[Recording], None],
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    change(recording)
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(recording))
    line = complaint(path, capsys)
    assert says in line
    assert not re.search(r"Traceback|pydantic", line)


def test_request_larger_than_the_pool_is_named(
    recording: Recording, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workload = recording["workload"]
    workload["num_blocks"] = 2
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(recording))
    line = complaint(path, capsys)
    assert re.search(r"request \S+ is refused: the prompt has \d+ tokens", line)
    assert f"holds {workload['block_size']}" in line
