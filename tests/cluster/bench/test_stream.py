from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decodefleet.cluster.bench.http import Exchange
from decodefleet.cluster.bench.stream import events, read


def exchange(*timed: tuple[float, Any], ended: float = 9.0) -> Exchange:
    """Events as JSON values or raw strings, each in a piece of its own, at seconds after 1.0."""
    pieces = []
    for at, event in timed:
        data = event if isinstance(event, str) else json.dumps(event)
        pieces.append((1.0 + at, f"data: {data}\n\n".encode()))
    return Exchange(started=1.0, ended=ended, status=200, pieces=pieces)


def text(value: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"text": value, "finish_reason": finish}]}


def usage(prompt: int, completion: int, **details: int) -> dict[str, Any]:
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    return {"choices": [], "usage": counts | ({"prompt_tokens_details": details} if details else {})}


def test_times_and_counts() -> None:
    outcome = read(
        exchange(
            (0.5, text("a")),
            (0.75, text("b")),
            (1.5, text("c")),
            (1.5, text("", "length")),
            (1.5, usage(7, 4, cached_tokens=3)),
            (1.5, "[DONE]"),
            ended=3.0,
        )
    )
    assert outcome.error is None
    assert outcome.ttft == 0.5
    assert outcome.gaps == (0.25, 0.75)
    assert outcome.latency == 2.0
    assert (outcome.prompt_tokens, outcome.output_tokens, outcome.cached_tokens) == (7, 4, 3)
    # four tokens in three pieces: the counts are the server's, not the chunks'
    assert outcome.tpot == pytest.approx(1.0 / 3)
    assert outcome.counted_from == "usage"
    assert outcome.finish_reason == "length"


def test_without_usage_chunks_are_counted_and_said_so() -> None:
    outcome = read(exchange((1, text("a")), (2, text("b")), (3, "[DONE]")))
    assert (outcome.output_tokens, outcome.counted_from, outcome.prompt_tokens) == (2, "chunks", None)


def test_usage_in_every_chunk_takes_the_last() -> None:
    first, last = text("a") | {"usage": usage(3, 1)["usage"]}, text("b") | {"usage": usage(3, 2)["usage"]}
    assert read(exchange((1, first), (2, last))).output_tokens == 2


def test_half_a_character_is_a_token_without_text() -> None:
    outcome = read(exchange((1, text("")), (2, text("é")), (2, text("", "stop")), (2, usage(1, 2))))
    assert outcome.ttft == 1
    assert outcome.gaps == (1,)


def test_the_role_of_a_chat_is_no_token() -> None:
    role = {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
    word = {"choices": [{"delta": {"content": "Hi"}, "finish_reason": None}]}
    assert read(exchange((1, role), (4, word))).ttft == 4


@pytest.mark.parametrize(
    ("given_exchange", "error"),
    [
        (Exchange(failure="timeout"), "timeout"),
        (Exchange(status=429), "HTTP 429"),
        (exchange((1, text("a")), (2, {"error": {"message": "lost"}}), (2, "[DONE]")), "error in stream"),
        (exchange((1, "[DONE]")), "no tokens"),
        (exchange((1, "{broken")), "malformed event"),
    ],
)
def test_kinds_of_failure(given_exchange: Exchange, error: str) -> None:
    assert read(given_exchange).error == error


def test_an_error_that_is_null_is_none() -> None:
    assert read(exchange((1, text("a") | {"error": None}))).error is None


@given(cuts=st.lists(st.integers(1, 200)), newline=st.sampled_from(["\n", "\r\n"]))
def test_events_do_not_depend_on_how_bytes_were_cut(cuts: list[int], newline: str) -> None:
    lines = [": ping", "", "data: one", "", "event: x", "data: two", "data: lines", "", "data:[DONE]", "", ""]
    stream = newline.join(lines).encode()
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    pieces = [(float(end), stream[start:end]) for start, end in pairwise(edges)]
    found = list(events(pieces))
    assert [data for _, data in found] == [b"one", b"two\nlines", b"[DONE]"]
    # an event arrives with the piece that holds its last byte
    for arrival, data in found:
        ends = stream.index(data.splitlines()[-1]) + len(data.splitlines()[-1]) + 2 * len(newline)
        assert arrival == min(edge for edge in edges if edge >= ends)
