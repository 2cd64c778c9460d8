"""What a load test asks."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from cluster.bench_load import Pace, send_times
from cluster.bench_prompts import (
    BenchRequest,
    RandomPrompts,
    file_requests,
    random_requests,
    trace_requests,
)
from cluster.errors import CommandError


def test_made_up_prompts_have_their_lengths_and_share_their_prefix_alone() -> None:
    wanted = RandomPrompts(40, 7, vocab_size=100, prefix_tokens=25, num_prefixes=2)
    requests = random_requests(wanted, 6, "completions", seed=3)
    prompts = [request.prompt for request in requests]
    assert [len(prompt) for prompt in prompts] == [40] * 6
    assert {request.max_tokens for request in requests} == {7}
    for i, one in enumerate(prompts):
        for other in prompts[i + 1 :]:
            same_prefix = one[:25] == other[:25]
            assert same_prefix == (prompts.index(other) % 2 == i % 2)
            assert one[25:] != other[25:]
    assert all(isinstance(p, list) and 0 <= min(p) <= max(p) < 100 for p in prompts)
    assert random_requests(wanted, 6, "completions", seed=3) == requests
    assert random_requests(wanted, 6, "completions", seed=4) != requests


def test_lengths_spread_evenly_around_the_middle() -> None:
    wanted = RandomPrompts(100, 50, vocab_size=9, spread=0.2)
    requests = random_requests(wanted, 400, "completions", seed=0)
    assert {len(r.prompt) for r in requests} == set(range(80, 121))
    assert {r.max_tokens for r in requests} == set(range(40, 61))


def test_chats_get_words() -> None:
    (request,) = random_requests(RandomPrompts(12, 3, vocab_size=9), 1, "chat", seed=0)
    assert isinstance(request.prompt, str)
    assert len(request.prompt.split()) == 12


def test_a_trace_keeps_times_lengths_and_what_was_shared(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 1000, "input_length": 600, "output_length": 5, "hash_ids": [7, 8]},
        {"timestamp": 3000, "input_length": 700, "output_length": 6, "hash_ids": [7, 9]},
        {"timestamp": 3500, "input_length": 10, "output_length": 1},
    ]
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(json.dumps(row) for row in rows).encode()))
    first, second, third = trace_requests(path, limit=None, speed=2, vocab_size=400)
    assert [r.arrival_seconds for r in (first, second, third)] == [0, 1, 1.25]
    assert [len(r.prompt) for r in (first, second, third)] == [600, 700, 10]
    assert [r.max_tokens for r in (first, second, third)] == [5, 6, 1]
    assert first.prompt[:512] == second.prompt[:512]
    assert first.prompt[512:600] != second.prompt[512:600]
    assert isinstance(first.prompt, list)
    assert max(first.prompt) < 400


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one\n\ntwo\n", ["one", "two", "one"]),
        ('{"prompt": "a"}\n{"question": "b"}\n{"turns": ["c", "d"]}', ["a", "b", "c"]),
        ('{"text": "a"}', ["a", "a", "a"]),
        ('\ufeff{"text": "a"}\r\n{"text": "b"}\r\n', ["a", "b", "a"]),
        ('{"text": "a\u2028b\u2029c\x85d"}', ["a\u2028b\u2029c\x85d"] * 3),
        ("\ufeffone", ["one"] * 3),
    ],
)
def test_texts_of_a_file_come_in_turn(tmp_path: Path, text: str, expected: list[str]) -> None:
    path = tmp_path / "prompts"
    path.write_text(text)
    requests = file_requests(path, 3, max_tokens=4)
    assert requests == [BenchRequest(prompt, 4) for prompt in expected]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n", "holds no prompt"),
        ('{"prompt": "a"}\n{"prompt":', "prompt 2: this is no JSON"),
        *[
            (line, "prompt 1: .* must be an object with one under `prompt`")
            for line in ('{"answer": "a"}', '{"turns": 5}', '{"turns": {"a": 1}}', '{"turns": []}')
        ],
        (r'{"prompt": "\ud800"}', "prompt 1: .* surrogates not allowed"),
    ],
)
def test_a_broken_file_is_told(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "prompts"
    path.write_text(text)
    with pytest.raises(CommandError, match=message):
        file_requests(path, 3, max_tokens=4)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 50.0])
def test_send_times_have_the_rate_and_the_burstiness(burstiness: float) -> None:
    """The variation of the pauses is 1 / sqrt(burstiness)."""
    requests = [BenchRequest("x", 1)] * 20_000
    pace = Pace(requests_per_second=8, burstiness=burstiness)
    pauses = np.diff(list(send_times(requests, pace, np.random.default_rng(0))))
    assert pauses.mean() == pytest.approx(1 / 8, rel=0.05)
    assert pauses.std() / pauses.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_recorded_times_win_and_without_a_rate_all_come_at_once() -> None:
    rng = np.random.default_rng(0)
    recorded = [BenchRequest("x", 1, 0.0), BenchRequest("x", 1, 2.5)]
    assert list(send_times(recorded, Pace(100), rng)) == [0.0, 2.5]
    assert list(send_times([BenchRequest("x", 1)] * 3, Pace(), rng)) == [0.0] * 3
