"""Spans of a request as an exporter gets them."""

import subprocess
import sys

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from decodefleet.cluster.observability.exchange import Exchange
from decodefleet.cluster.observability.router_metrics import RouterMetrics
from decodefleet.cluster.observability.spans import Tracing
from decodefleet.cluster.observability.timeline import Timeline
from decodefleet.cluster.observability.tracing import TracingUnavailable, open_tracing, response_header
from decodefleet.worker.protocol import Placement, TokenDelta

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"


def make_timeline(clock) -> Timeline:
    """Two attempts: the first worker is lost after a token, the second ends the answer."""
    timeline = Timeline("r", "m", 40, RouterMetrics(), clock=lambda: clock[0])
    for number, worker in enumerate(("w0", "w1")):
        timeline.placing()
        clock[0] += 1.0
        timeline.placed(
            Placement(
                request_id="r",
                worker_id=worker,
                incarnation="i",
                endpoint="e",
                epoch=7,
                predicted_s=0.25,
                waited_s=0.5,
            )
        )
        clock[0] += 2.0
        timeline.received(TokenDelta(request_id="r", tokens=(1,), queued_s=0.5))
        clock[0] += 1.0
        if number == 0:
            timeline.moved(ConnectionError("lost"))
    timeline.finished("length")
    timeline.closed()
    return timeline


def spans_of(headers: dict[str, str], **fields):
    exporter = InMemorySpanExporter()
    tracing = Tracing("http://127.0.0.1:1/v1/traces", "router-1", exporter)
    exchange = Exchange("abc", "POST", "/v1/completions", 200)
    exchange.span = tracing.begin(headers)
    exchange.timelines.append(make_timeline([exchange.began]))
    for name, value in fields.items():
        setattr(exchange, name, value)
    tracing.end(exchange)
    tracing.close()
    return exchange, exporter.get_finished_spans()


def test_spans_join_the_caller_s_trace_and_cover_each_part():
    exchange, spans = spans_of({"traceparent": f"00-{TRACE}-{PARENT}-01"})
    (root,) = [span for span in spans if span.kind == SpanKind.SERVER]
    assert root.name == "POST /v1/completions"
    assert format(root.parent.span_id, "016x") == PARENT
    assert {format(span.context.trace_id, "032x") for span in spans} == {TRACE}
    assert root.attributes["http.response.status_code"] == 200
    names = [span.name for span in spans]
    parts = ["router.place", "scheduler.queue", "worker", "worker.queue", "worker.prefill", "worker.decode"]
    assert all(names.count(part) == 2 for part in parts)
    assert root.resource.attributes["service.name"] == "decodefleet"
    assert root.resource.attributes["service.instance.id"] == "router-1"
    assert response_header(exchange.span) == f"00-{TRACE}-{root.context.span_id:016x}-01"


def test_times_are_those_of_the_timeline():
    _, spans = spans_of({})

    def seconds(name: str) -> list[float]:
        return [round((span.end_time - span.start_time) / 1e9, 3) for span in spans if span.name == name]

    assert seconds("generate") == [8.0]
    assert seconds("router.place") == [1.0, 1.0]
    assert seconds("scheduler.queue") == [0.5, 0.5]
    assert seconds("worker") == [3.0, 3.0]
    assert seconds("worker.queue") == [0.5, 0.5]
    assert seconds("worker.prefill") == [1.5, 1.5]
    assert seconds("worker.decode") == [1.0, 1.0]


def test_a_child_lies_inside_its_parent_and_a_lost_worker_shows():
    _, spans = spans_of({})
    by_id = {span.context.span_id: span for span in spans}
    for span in spans:
        if span.name.startswith(("worker.", "scheduler.", "router.")):
            parent = by_id[span.parent.span_id]
            assert parent.start_time <= span.start_time <= span.end_time
            assert span.end_time <= parent.end_time
    workers = [span for span in spans if span.name == "worker"]
    assert [span.status.status_code for span in workers] == [StatusCode.ERROR, StatusCode.UNSET]
    assert [span.attributes["decodefleet.worker.id"] for span in workers] == ["w0", "w1"]


def test_a_failure_is_the_request_s_status():
    _, spans = spans_of({}, error="worker_lost")
    (root,) = [span for span in spans if span.kind == SpanKind.SERVER]
    assert root.status.status_code == StatusCode.ERROR
    assert root.attributes["error.type"] == "worker_lost"


@pytest.mark.parametrize("header", ["", "00-zz-zz-01", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "x" * 9999])
def test_a_broken_parent_is_no_parent(header):
    _, spans = spans_of({"traceparent": header})
    (root,) = [span for span in spans if span.kind == SpanKind.SERVER]
    assert root.parent is None


def test_what_the_caller_does_not_sample_costs_nothing():
    _, spans = spans_of({"traceparent": f"00-{TRACE}-{PARENT}-00"})
    assert spans == ()


def test_without_an_endpoint_nothing_is_loaded():
    assert open_tracing(None, "router-1") is None
    # redis-py loads the SDK's metrics by itself, where the SDK is installed
    script = "import sys, decodefleet.cluster.api.app; assert 'opentelemetry.sdk.trace' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "decodefleet.cluster.observability.spans", None)
    with pytest.raises(TracingUnavailable, match=r"decodefleet\[otel\]"):
        open_tracing("http://127.0.0.1:4318/v1/traces", "router-1")
