"""Recorded workloads: each format is read, and what is broken is named with its line."""

import gzip
from pathlib import Path

import pytest

from cluster.traces import TraceError, read_trace
from scheduler.simulate import TraceRequest
from tests.support.chat_trace import example_trace as make_example_trace

MOONCAKE = (
    '{"timestamp": 5000, "input_length": 513, "output_length": 4, "hash_ids": [900, 901]}\n'
    '{"timestamp": 7500, "input_length": 512, "output_length": 0, "hash_ids": [900]}\n'
    "\n"
    '{"timestamp": 8000, "input_length": 10, "output_length": 2}\n'
)
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:15:46.6805900,374,44\r\n"
    "2023-11-16 18:15:50.6805900,396,109\r\n"
)
LENGTHS = (
    '{"prompt_tokens": 7, "output_tokens": 3, "arrival_seconds": 2.5}\n'
    '{"prompt_tokens": 8, "output_tokens": 1}\n'
)


def write(folder: Path, content: str | bytes) -> Path:
    path = folder / "trace"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_mooncake(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, MOONCAKE))
    assert trace.format == "Mooncake JSONL"
    assert trace.requests == [
        TraceRequest(0.0, 513, 4, prefix_ids=(0, 1)),
        TraceRequest(2.5, 512, 1, prefix_ids=(0,)),
        TraceRequest(3.0, 10, 2),
    ]


def test_azure(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, AZURE))
    assert trace.format == "Azure CSV"
    assert trace.requests == [TraceRequest(0.0, 374, 44), TraceRequest(4.0, 396, 109)]


def test_azure_times_with_a_time_zone(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-10 00:00:00.009930+00:00,10,1\n"
        "2024-05-10 02:00:01.009930+02:00,11,1\n",
    )
    assert [r.arrival_seconds for r in read_trace(path).requests] == [0.0, 1.0]


def test_lengths_sorted_by_arrival(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, LENGTHS))
    assert trace.format == "lengths JSONL"
    assert trace.requests == [TraceRequest(0.0, 8, 1), TraceRequest(2.5, 7, 3)]


@pytest.mark.parametrize("content", [MOONCAKE, AZURE, LENGTHS])
def test_gzip_is_found_by_content(tmp_path: Path, content: str) -> None:
    plain = read_trace(write(tmp_path, content))
    assert read_trace(write(tmp_path, gzip.compress(content.encode()))) == plain


def test_limit_and_speed(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, MOONCAKE), limit=2, speed=10)
    assert [r.arrival_seconds for r in trace.requests] == [0.0, 0.25]


def test_what_is_beyond_the_limit_is_not_read(tmp_path: Path) -> None:
    path = write(tmp_path, MOONCAKE + "broken\n")
    assert len(read_trace(path, limit=3).requests) == 3
    with pytest.raises(TraceError, match="line 5"):
        read_trace(path)


HEAD = '{"prompt_tokens": 7, "output_tokens": 3}\n'


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "holds no request"),
        ('{"tokens": 1}\n', "no known trace format; known are Mooncake"),
        ("[1, 2]\n", "no known trace format"),
        (b"\x00\xff\r\x01 binary\n", "no known trace format"),
        (HEAD + "oops\n", "line 2"),
        (HEAD + '{"prompt_tokens": 0, "output_tokens": 3}\n', "line 2"),
        (HEAD + "\n" + '{"prompt_tokens": 7}\n', "line 3"),
        (HEAD + '{"prompt_tokens": 99999999999, "output_tokens": 3}\n', "line 2"),
        (HEAD + '{"prompt_tokens": 7, "output_tokens": 3, "arrival_seconds": -1}\n', "line 2"),
        (HEAD.encode() + b'{"prompt_tokens": 7, "\xff": 3}\n', "line 2"),
        (
            '{"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [1]}\n',
            r"line 1.* 600 prompt tokens need 2 hash ids \(one per 512 tokens\), got 1",
        ),
        (AZURE + "2023-11-16 18:15:50,x,1\n", "line 4"),
        (AZURE + "yesterday,1,1\n", "line 4"),
        (AZURE + "2023-11-16 18:15:50,1\n", "line 4.* 3 columns expected, got 2"),
        (gzip.compress(MOONCAKE.encode(), mtime=0)[:-12], "Cannot read the trace"),
    ],
)
def test_what_is_broken_is_named(tmp_path: Path, content: str | bytes, words: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(TraceError, match=words) as raised:
        read_trace(path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "nowhere")
    with pytest.raises(TraceError, match="Is a directory"):
        read_trace(tmp_path)


def test_the_example_is_what_its_generator_makes(example_trace: Path) -> None:
    assert example_trace.read_text().splitlines() == list(make_example_trace())


def test_recorded_traces(test_data_dir: Path | None, example_trace: Path) -> None:
    """Without the recordings, the made-up trace of the same shape stands in for them."""
    if test_data_dir is None:
        assert len(read_trace(example_trace).requests) == 875
        return
    conversation = read_trace(test_data_dir / "mooncake" / "conversation_trace.jsonl.gz")
    assert conversation.format == "Mooncake JSONL"
    assert len(conversation.requests) == 12_031
    assert sum(r.prompt_tokens for r in conversation.requests) == 144_793_823
    assert conversation.requests[-1].arrival_seconds == pytest.approx(3536.999)
    azure = read_trace(test_data_dir / "azure" / "AzureLLMInferenceTrace_conv.csv.gz")
    assert azure.format == "Azure CSV"
    assert len(azure.requests) == 19_366
