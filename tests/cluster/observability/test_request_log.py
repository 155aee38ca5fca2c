"""The line of a request: what it tells, and that nothing in a request can forge another line."""

import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decodefleet.cluster.observability.exchange import Exchange
from decodefleet.cluster.observability.request_log import fields_of, log_exchange, words_of
from decodefleet.cluster.observability.router_metrics import RouterMetrics
from decodefleet.cluster.observability.timeline import Timeline
from decodefleet.worker.protocol import Placement, TokenDelta


def make_exchange(*, finished=("stop",), tenant="acme", **fields) -> Exchange:
    now = [10.0]
    timeline = Timeline("chatcmpl-1", "m", 40, RouterMetrics(), tenant=tenant, clock=lambda: now[0])
    timeline.placing()
    timeline.placed(
        Placement(
            request_id="chatcmpl-1", worker_id="w3", incarnation="i", endpoint="e", epoch=1, predicted_s=0.1
        )
    )
    for gap in (0.5, 0.25, 0.25):
        now[0] += gap
        timeline.received(TokenDelta(request_id="chatcmpl-1", tokens=(1,), cached_tokens=16, queued_s=0.125))
    for reason in finished:
        timeline.finished(reason)
    timeline.closed()
    exchange = Exchange("abc", "POST", "/v1/chat/completions", 200, timelines=[timeline], began=10.0)
    exchange.ended = 11.0
    for name, value in fields.items():
        setattr(exchange, name, value)
    return exchange


def test_a_line_tells_what_became_of_a_request():
    assert fields_of(make_exchange()) == {
        "id": "abc",
        "method": "POST",
        "route": "/v1/chat/completions",
        "status": 200,
        "outcome": "stop",
        "duration_s": 1.0,
        "generation": "chatcmpl-1",
        "model": "m",
        "tenant": "acme",
        "prompt_tokens": 40,
        "cached_tokens": 16,
        "generated_tokens": 3,
        "queue_s": 0.125,
        "ttft_s": 0.5,
        "tpot_s": 0.25,
        "longest_gap_s": 0.25,
        "worker": "w3",
        "attempts": 1,
    }


def test_outcomes():
    assert make_exchange(finished=()).outcome == "client_left"
    assert make_exchange(error="worker_lost").outcome == "worker_lost"
    assert Exchange("a", "GET", "/health", 200).outcome == "ok"
    exchange = make_exchange()
    exchange.failed(ValueError("no"), "bad")
    exchange.failed(ValueError("later"), "worse")
    assert exchange.outcome == "bad"


@given(st.text())
def test_no_value_starts_a_line_or_a_field(text):
    line = words_of({"id": text, "status": 200})
    assert len(line.splitlines()) <= 1
    assert line.isascii()
    assert line.isprintable()
    assert line.endswith(" status=200")
    word = line.removeprefix("id=").removesuffix(" status=200")
    assert (json.loads(word) if word.startswith('"') else word) == text


@pytest.mark.parametrize(("route", "level"), [("/ready", "DEBUG"), ("/v1/models", "INFO")])
@pytest.mark.parametrize("status", [200, 503])
def test_what_machines_ask_for_is_told_to_those_who_debug(caplog, route, level, status):
    caplog.set_level(logging.DEBUG, "decodefleet.requests")
    log_exchange(Exchange("a", "GET", route, status))
    (record,) = caplog.records
    assert record.levelname == level
    assert record.request["route"] == route
    assert "route" in record.getMessage()
    json.dumps(record.request)


def test_fields_are_not_told_twice(caplog):
    caplog.set_level(logging.INFO, "decodefleet.requests")
    log_exchange(make_exchange(), as_fields=True)
    (record,) = caplog.records
    assert record.getMessage() == "request"
    assert record.request["generated_tokens"] == 3
