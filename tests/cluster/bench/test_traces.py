from __future__ import annotations

from pathlib import Path

import pytest

from decodefleet.cluster.bench.prompts import TokenIds
from decodefleet.cluster.bench.traces import TraceError, read_trace

MOONCAKE = """\
{"timestamp": 1000, "input_length": 600, "output_length": 7, "hash_ids": [0, 1]}
{"timestamp": 3000, "input_length": 1030, "output_length": 0, "hash_ids": [0, 2]}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:47.1805900,12,3
"""


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_mooncake_keeps_times_lengths_and_sharing(tmp_path: Path) -> None:
    first, second = read_trace(write(tmp_path, "trace.jsonl", MOONCAKE))
    assert (first.at, second.at) == (0.0, 2.0)
    assert (first.input_len, second.input_len) == (600, 1030)
    assert (first.output_len, second.output_len) == (7, 1)
    make = TokenIds("seed")
    one, other = make(first), make(second)
    assert one[:512] == other[:512]
    assert one[512:600] != other[512:600]


def test_azure(tmp_path: Path) -> None:
    first, second = read_trace(write(tmp_path, "trace.csv", AZURE), speed=2)
    assert (first.input_len, first.output_len) == (374, 44)
    assert second.at == pytest.approx(0.25)


def test_limits(tmp_path: Path) -> None:
    path = write(tmp_path, "trace.jsonl", MOONCAKE)
    assert len(read_trace(path, limit=1)) == 1
    first, second = read_trace(path, max_input=520, max_output=4)
    assert (first.input_len, second.input_len, first.output_len) == (520, 520, 4)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("trace.jsonl", '{"timestamp": 1}\n', "trace.jsonl:1"),
        ("trace.jsonl", "\n", "holds no request"),
        ("trace.csv", "TIMESTAMP,Tokens\n2023-11-16 18:15:46,3\n", "trace.csv:2: expected TIMESTAMP"),
        ("trace.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,3,4\n", "trace.csv:2"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read_trace(write(tmp_path, name, text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot read"):
        read_trace(tmp_path / "none.jsonl")
