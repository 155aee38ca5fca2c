"""Published request traces as workloads: Mooncake's JSON lines and Azure's CSV.

Mooncake gives one hash id per 512-token block of the prompt: equal ids are equal tokens, so its prefix
sharing is replayed as it was. Azure gives times and lengths only; its prompts share nothing.
"""

from __future__ import annotations

import csv
import datetime as dt
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import msgspec

from .workload import Request, Segment

MOONCAKE_BLOCK = 512


class TraceError(ValueError):
    """A trace that cannot be read; the message names the file and the line."""


class _Mooncake(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


def read_trace(
    path: Path,
    *,
    limit: int | None = None,
    speed: float = 1.0,
    max_input: int | None = None,
    max_output: int | None = None,
) -> list[Request]:
    """The first `limit` requests of a trace, in order of arrival, the first at second 0.

    speed: 2 replays twice as fast. max_input, max_output: what is longer is cut to this many tokens.
    Raises TraceError.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = _azure(file, path) if path.suffix == ".csv" else _mooncake(file, path)
            requests = list(islice(reader, limit))
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"cannot read {path}: {error}") from error
    if not requests:
        raise TraceError(f"{path} holds no request")
    requests.sort(key=lambda request: request.at or 0.0)
    start = requests[0].at or 0.0
    return [
        Request(
            _cut(request.segments, max_input),
            min(request.output_len, max_output or request.output_len),
            ((request.at or 0.0) - start) / speed,
        )
        for request in requests
    ]


def _mooncake(lines: Iterator[str], path: Path) -> Iterator[Request]:
    decoder = msgspec.json.Decoder(_Mooncake)
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise TraceError(f"{path}:{number}: {error}") from error
        yield Request(tuple(_blocks(row, number)), max(1, row.output_length), row.timestamp / 1000)


def _blocks(row: _Mooncake, number: int) -> Iterator[Segment]:
    left = max(1, row.input_length)
    for block in row.hash_ids:
        if left <= 0:
            return
        yield Segment(f"block/{block}", min(MOONCAKE_BLOCK, left))
        left -= MOONCAKE_BLOCK
    if left > 0:
        yield Segment(f"tail/{number}", left)


def _azure(lines: Iterator[str], path: Path) -> Iterator[Request]:
    for number, row in enumerate(csv.DictReader(lines), start=2):
        try:
            # seven digits of a second are more than datetime reads
            moment = dt.datetime.fromisoformat(row["TIMESTAMP"].strip()[:26]).replace(tzinfo=dt.UTC)
            inputs, outputs = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            expected = "TIMESTAMP,ContextTokens,GeneratedTokens"
            raise TraceError(f"{path}:{number}: expected {expected} ({error})") from error
        yield Request((Segment(f"azure/{number}", max(1, inputs)),), max(1, outputs), moment.timestamp())


def _cut(segments: tuple[Segment, ...], most: int | None) -> tuple[Segment, ...]:
    if most is None:
        return segments
    kept: list[Segment] = []
    for segment in segments:
        room = most - sum(part.length for part in kept)
        if room <= 0:
            break
        kept.append(Segment(segment.key, min(segment.length, room)))
    return tuple(kept)
