"""The suite's own judgement: what is missing, cut off or different in an answer is found."""

from __future__ import annotations

import json
from typing import Any

import pytest
from chaos_cluster import GOES_ON, SOME_BREAK, Outcome, Scenario, judge
from chaos_streams import Request, Transcript


def transcript(*events: Any, end: bytes = b"0\r\n\r\n", done: bool = True) -> Transcript:
    """Of a stream with these events, one in each piece."""
    texts = [json.dumps(event) for event in events] + ["[DONE]"] * done
    parts = [f"data: {text}\n\n".encode() for text in texts]
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunks = [b"%x\r\n%s\r\n" % (len(part), part) for part in parts]
    pieces = [(float(at), data) for at, data in enumerate([head, *chunks, end], start=1)]
    return Transcript(Request(0, {"stream": True}, 0.0), 0.0, pieces)


def event(text: str, finish: str | None = None, index: int = 0) -> dict[str, Any]:
    return {"choices": [{"index": index, "text": text, "finish_reason": finish}]}


def judged(given: Transcript, streams: str = GOES_ON) -> Outcome:
    whole = transcript(event("one "), event("two", "stop")).answer()
    outcome = Outcome("s", "", 0.0)
    judge(given, whole, Scenario("s", lambda cluster, rng: "", streams=streams), outcome)
    return outcome


def test_the_same_text_in_other_pieces_is_equal() -> None:
    assert judged(transcript(event("o"), event("ne two"), event("", "stop"))).equal == 1


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (transcript(event("one "), event("too", "stop")), "differs from character 5"),
        (transcript(event("one one "), event("two", "stop")), "differs from character 4"),
        (transcript(event("one "), event("two", "length")), "finish_reason"),
        (transcript(event("one ")), "without an end"),
        (transcript(event("one two", "stop"), event("two", "stop")), "goes on after its end"),
        (transcript(event("one two", "stop"), done=False), "has no end"),
        (transcript(event("one two", "stop"), end=b""), "the connection ended"),
        (transcript(event("one "), {"error": {"message": "lost"}}), "an error in the stream"),
        (Transcript(Request(0, {"stream": True}, 0.0), 0.0), "before anything came"),
    ],
)
def test_what_is_wrong_is_said(given: Transcript, says: str) -> None:
    (fault,) = judged(given).faults
    assert says in fault


def test_a_broken_connection_may_be_excused_but_no_error_of_ours() -> None:
    assert judged(transcript(event("one "), end=b""), SOME_BREAK).faults == []
    assert judged(transcript(event("one "), {"error": {"message": "lost"}}), SOME_BREAK).faults


def test_a_pause_counts_from_the_harm_on() -> None:
    given = transcript(event("one two", "stop"))
    given.pieces = [(1.0, b"a"), (5.0, b"b"), (6.5, b"c")]
    assert given.silence_after(0.5) == 4.0
    assert given.silence_after(5.5) == 1.5
    assert given.silence_after(7.0) == 0.0
