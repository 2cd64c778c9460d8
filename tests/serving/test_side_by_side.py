"""The table of two servers, from runs of which every number is known."""

import os

from cluster.bench_client import Outcome
from cluster.bench_load import LoadResult
from cluster.bench_report import summarize
from tests.benchmarks.side_by_side import Run, Scenario, Server, compare, table
from tests.support.http_server import MODEL, http_server
from tests.support.metrics import scrape

DECODE, PREFILL = Scenario(128, 128, 8, 8), Scenario(1500, 4, 4, 8)


def run(server: str, scenario: Scenario, tokens: int, idle_cores: float | None = 0.01) -> Run:
    """One request of 10 prompt tokens and `tokens` of output, in a second."""
    outcome = Outcome(0.0, [0.2, 1.0], prompt_tokens=10, output_tokens=tokens)
    result = summarize(LoadResult([outcome], 1.0), limits_ms={}, percentiles=[50, 99])
    return Run(server, scenario, 1, idle_cores, result)


def test_ratios_are_of_neighbours_and_prompts_count_where_they_are_the_work() -> None:
    runs = [
        *(run("a", DECODE, 100), run("b", DECODE, 50)),
        *(run("a", PREFILL, 20), run("b", PREFILL, 5)),
        *(run("a", DECODE, 300), run("b", DECODE, 100, idle_cores=0.4)),
        *(run("a", PREFILL, 20), run("b", PREFILL, 10, idle_cores=None)),
    ]
    _, _, decode, prefill = table(runs, "a", "b").splitlines()
    assert "| 200.0 (100.0-300.0) | 75.0 (50.0-100.0) | **2.50 (2.00-3.00)** |" in decode
    assert decode.endswith("| 0.40, disturbed |")
    assert "| 30.0 (30.0-30.0) | 17.5 (15.0-20.0) | **1.75 (1.50-2.00)** |" in prefill
    assert "| 200 / 200 | 42 / 144 |" in prefill
    assert prefill.endswith("| not watched |")


def test_both_servers_get_the_same_load_in_turn() -> None:
    scenario = Scenario.parse("20/5/2/3")
    with http_server() as one, http_server() as other:
        a = Server("a", one.url, os.getpid())
        b = Server("b", other.url, None)
        runs = compare(a, b, [scenario], rounds=2, vocab_size=200)
        counted = [scrape(url, MODEL).value("prompt_tokens_total") for url in (one.url, other.url)]
    assert [run.server for run in runs] == ["a", "b"] * 2
    assert {run.result.completed for run in runs} == {3}
    assert {run.result.output_tokens for run in runs} == {15}
    # Two rounds of three requests, and the one before that warms up.
    assert counted == [(2 * 3 + 1) * 20] * 2
    assert [run.idle_cores is None for run in runs] == [True, False] * 2
