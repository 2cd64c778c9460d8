"""`palimpsest simulate`, as people and scripts see it."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from matplotlib import image

from cluster.cli import main


class Output(NamedTuple):
    code: int
    out: str
    err: str


Simulate = Callable[..., Output]


@pytest.fixture
def simulate(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Simulate:
    def run(*arguments: object, columns: int = 100) -> Output:
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(sys, "argv", ["palimpsest", "simulate", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        code = ended.value.code
        return Output(code if isinstance(code, int) else 0, *capsys.readouterr())

    return run


def rows(out: str) -> dict[str, list[str]]:
    """Label to cells; labels and cells are two or more spaces apart."""
    split = [[part for part in line.split("  ") if part.strip()] for line in out.splitlines()]
    return {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in split if cells}


def test_table_json_and_figures_tell_the_same(
    simulate: Simulate, example_trace: Path, tmp_path: Path
) -> None:
    out = tmp_path / "new" / "folder"
    output = simulate(
        *("--trace", example_trace, "--limit", 120, "--speed", 4),
        *("--num-blocks", 4001, "--num-blocks", 1001, "--out", out),
        *("--set", "scheduler.max_num_seqs=32"),
    )
    assert (output.code, output.err) == (0, "")
    table = rows(output.out)
    assert table["pool, in blocks"] == ["1,001", "4,001"]
    assert table["requests finished"] == ["120", "120"]
    written = json.loads((out / "simulation.json").read_text())
    assert written["settings"]["scheduler"]["max_num_seqs"] == 32
    assert written["settings"]["scheduler"]["steps_in_flight"] == 1
    assert written["trace"] == {
        "name": "chat.jsonl",
        "format": "Mooncake JSONL",
        "requests": 120,
        "speed": 4.0,
    }
    small, large = written["pools"]
    assert (small["num_blocks"], large["num_blocks"]) == (1001, 4001)
    assert small["preemptions"]["blocks"] > 0
    assert table["preemptions"][0] == str(sum(small["preemptions"].values()))
    assert table["tokens recomputed"][0] == f"{small['recomputed_tokens']:,}"
    assert table["hit ratio, first admissions"][1] == f"{large['hit_ratio']:.2%}"
    assert sum(small["timeline"]["increments"]["hits_tokens"]) == small["hits_tokens"]
    files = {path.name for path in out.iterdir()}
    assert files == {"simulation.json", "pool-1001.png", "pool-4001.png", "capacity.png"}
    for path in out.glob("*.png"):
        pixels = image.imread(path)
        assert pixels.shape[1] > 1000
        assert len(np.unique(pixels[::7, ::7, 0])) > 20


def test_one_pool_has_no_curve_and_nan_is_null(
    simulate: Simulate, example_trace: Path, tmp_path: Path
) -> None:
    output = simulate(
        "--trace", example_trace, "--limit", 10, "--num-blocks", 9001, "--out", tmp_path
    )
    assert output.code == 0
    assert {path.name for path in tmp_path.iterdir()} == {"simulation.json", "pool-9001.png"}
    (pool,) = json.loads((tmp_path / "simulation.json").read_text())["pools"]
    assert pool["resume_hit_ratio"] is None
    assert rows(output.out)["hit ratio, resumes"] == ["-"]


def test_many_pools_are_split_over_tables_that_fit(simulate: Simulate, example_trace: Path) -> None:
    pools = [2001, 3001, 4001, 5001, 6001, 7001]
    options = [part for pool in pools for part in ("--num-blocks", pool)]
    output = simulate("--trace", example_trace, "--limit", 5, *options, columns=80)
    assert max(map(len, output.out.splitlines())) <= 80
    heads = [line.split()[3:] for line in output.out.splitlines() if line.startswith("  pool,")]
    assert [cell for head in heads for cell in head] == [f"{pool:,}" for pool in pools]
    assert len(heads) > 1
    assert "…" not in output.out


def test_requests_that_cannot_be_served_have_a_row_with_the_reason(
    simulate: Simulate, tmp_path: Path
) -> None:
    trace = tmp_path / "lengths.jsonl"
    trace.write_text(
        "".join(f'{{"prompt_tokens": {n}, "output_tokens": 5}}\n' for n in (10, 200, 300, 5000))
    )
    output = simulate("--trace", trace, "--num-blocks", 11, "--set", "model.max_model_len=1000")
    table = rows(output.out)
    assert table["requests finished"] == ["1"]
    assert table["refused: larger than the pool"] == ["2"]
    assert table["refused: prompt over model.max_model_len"] == ["1"]
    assert "refused: queue full" not in table


def test_help_teaches_with_an_example(simulate: Simulate) -> None:
    output = simulate("--help", columns=120)
    assert output.code == 0
    assert (
        "palimpsest simulate --trace conversation_trace.jsonl.gz --num-blocks 40001" in output.out
    )


TRACE = "example"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--trace", "nowhere.jsonl", "--num-blocks", 100], "Cannot read the trace nowhere.jsonl"),
        (["--trace", __file__, "--num-blocks", 100], "no known trace format"),
        (["--trace", TRACE, "--num-blocks", 2], "all 875 requests were refused"),
        (["--trace", TRACE, "--num-blocks", 1], "'--num-blocks'"),
        (["--trace", TRACE], "'--num-blocks'"),
        (["--trace", TRACE, "--num-blocks", 100, "--block-size", 0], "'--block-size'"),
        (["--trace", TRACE, "--num-blocks", 100, "--limit", 0], "'--limit'"),
        (["--trace", TRACE, "--num-blocks", 100, "--speed", 0], "--speed is 0"),
        (["--trace", TRACE, "--num-blocks", 100, "--speed", "nan"], "--speed is nan"),
        (
            ["--trace", TRACE, "--num-blocks", 100, "--prefill-tokens-per-second", -1],
            "--prefill-tokens-per-second is -1",
        ),
        (["--trace", TRACE, "--num-blocks", 100, "--decode-step-ms", "inf"], "--decode-step-ms"),
        (
            ["--trace", TRACE, "--num-blocks", 100, "--set", "scheduler.max_num_seq=3"],
            "did you mean scheduler.max_num_seqs?",
        ),
        (
            ["--trace", TRACE, "--num-blocks", 100, "--set", "model.max_model_len=1"],
            "model.max_model_len is 1",
        ),
        (
            [
                *("--trace", TRACE, "--num-blocks", 9001),
                *("--set", "scheduler.enable_chunked_prefill=false"),
                *("--set", "scheduler.max_num_batched_tokens=512"),
            ],
            "scheduler.max_num_batched_tokens is 512",
        ),
        (
            ["--trace", TRACE, "--num-blocks", 100, "--out", f"{__file__}/folder"],
            "choose another folder with --out",
        ),
    ],
)
def test_a_mistake_is_named_with_exit_code_2(
    simulate: Simulate, example_trace: Path, arguments: list[object], words: str
) -> None:
    given = [example_trace if argument is TRACE else argument for argument in arguments]
    output = simulate(*given)
    assert output.code == 2
    assert output.out == ""
    assert words in output.err
    assert "Traceback" not in output.err
    if "Usage:" not in output.err:
        assert output.err.count("\n") == 1
