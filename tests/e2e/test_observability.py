"""Metrics, log lines, traces and the overview of a running stack."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families
from waiting import until

from decodefleet.cluster.observability.spans import Tracing

# those that vLLM's own dashboards and the gateways of its ecosystem read
VLLM = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
    "vllm:num_preemptions",
    "vllm:prompt_tokens",
    "vllm:generation_tokens",
    "vllm:request_success",
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:request_time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
    "vllm:request_inference_time_seconds",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
}


DEPLOY = Path(__file__).parents[2] / "deploy"
SUFFIXES = {".json", ".yaml"}
ELSEWHERE = (
    "decodefleet_kv_tier_",
    "decodefleet_scheduler_refusals",
    "decodefleet_scheduler_unreachable",
    "decodefleet_scheduler_directory_lag",
)


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture(scope="module")
def traced(make_stack: Callable[..., Any], exporter: InMemorySpanExporter) -> Iterator[Any]:
    tracing = Tracing("http://127.0.0.1:1/v1/traces", "router", exporter)
    yield make_stack(workers=2, tracing=tracing)
    tracing.close()


@pytest.fixture(scope="module")
def http(traced: Any) -> Iterator[httpx.Client]:
    with traced.http() as client:
        yield client


def complete(http: httpx.Client, **body: Any) -> httpx.Response:
    return http.post("/v1/completions", json={"prompt": "some words to say", "max_tokens": 6, **body})


def test_the_fleet_s_metrics_have_what_dashboards_of_vllm_read(http: httpx.Client) -> None:
    assert complete(http).status_code == 200

    def families() -> set[str] | None:
        found = {family.name for family in text_string_to_metric_families(http.get("/metrics").text)}
        return found if found >= VLLM else None

    assert all(name.startswith(("decodefleet_", "vllm:")) for name in until(families))


def test_what_dashboards_and_alerts_ask_for_is_there(http: httpx.Client) -> None:
    """On this stack; what only tiers, refusals and a directory have is checked in tests/deploy."""
    text = "".join(path.read_text(encoding="utf-8") for path in DEPLOY.rglob("*") if path.suffix in SUFFIXES)
    asked = {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"decodefleet_\w+", text)}
    assert len(asked) > 30
    complete(http).raise_for_status()

    def complete_scrape() -> bool | None:
        exported = re.findall(r"^# TYPE (\S+)", http.get("/metrics").text, re.MULTILINE)
        return all(name.startswith(ELSEWHERE) for name in asked - {*exported}) or None

    assert until(complete_scrape)


def test_one_line_per_request_with_its_tokens_and_times(
    http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "decodefleet.requests")
    evil = 'me" status=200\ninjected'
    complete(http, user=evil, ignore_eos=True).raise_for_status()
    http.get("/health")
    complete(http, temperature=9)
    with http.stream("POST", "/v1/completions", json={"prompt": "a b", "stream": True, "n": 2}) as answer:
        answer.read()
    lines = until(lambda: rows if len(rows := [*caplog.records]) >= 3 else None)
    good, bad, stream = (line.request for line in lines)
    assert (good["status"], good["generated_tokens"], good["outcome"]) == (200, 6, "length")
    assert good["tenant"] == evil
    assert good["worker"].startswith("worker-")
    assert 0 < good["ttft_s"] <= good["duration_s"]
    assert len(good["trace_id"]) == 32
    assert (bad["status"], bad["outcome"]) == (400, "invalid_request_error")
    assert "generated_tokens" not in bad
    assert stream["outcome"] in ("length", "stop", "length+stop")
    # what a caller says of itself is in the log alone
    assert "injected" not in http.get("/metrics").text
    for line in lines:
        assert "\n" not in line.getMessage()
        json.dumps(line.request)


def test_a_client_that_leaves_is_told_in_its_line(
    http: httpx.Client, caplog: pytest.LogCaptureFixture, traced: Any
) -> None:
    caplog.set_level(logging.INFO, "decodefleet.requests")
    with http.stream(
        "POST", "/v1/completions", json={"prompt": "x " * 500, "stream": True, "max_tokens": 900}
    ):
        pass
    (line,) = until(lambda: rows if (rows := [*caplog.records]) else None)
    assert line.request["outcome"] == "client_left"
    until(lambda: traced.router.metrics.in_flight._value.get() == 0)


def test_spans_reach_from_the_caller_to_the_worker(
    http: httpx.Client, exporter: InMemorySpanExporter, traced: Any
) -> None:
    trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    answer = http.post(
        "/v1/completions",
        json={"prompt": "some words", "max_tokens": 3},
        headers={"traceparent": f"00-{trace}-{parent}-01"},
    )
    assert answer.headers["traceresponse"].split("-")[1] == trace

    def finished() -> dict[str, Any]:
        # a request's spans end after its last byte, so the caller can be here first
        traced.tracing._provider.force_flush()
        return {
            span.name: span
            for span in exporter.get_finished_spans()
            if format(span.context.trace_id, "032x") == trace
        }

    spans = until(lambda: seen if "POST /v1/completions" in (seen := finished()) else None)
    assert {*spans} == {
        "POST /v1/completions",
        "generate",
        "router.place",
        "scheduler.queue",
        "worker",
        "worker.queue",
        "worker.prefill",
        "worker.decode",
    }
    assert spans["generate"].attributes["gen_ai.usage.completion_tokens"] == 3
    assert spans["worker"].attributes["decodefleet.worker.id"].startswith("worker-")


def test_the_overview_of_a_running_fleet(http: httpx.Client) -> None:
    answer = complete(http).json()
    seen = http.get("/debug/fleet").json()
    assert len(seen["workers"]) == 2
    assert answer["id"] in [decision["request_id"] for decision in seen["placements"]]

    def measured() -> Any:
        complete(http)
        points = http.get("/debug/fleet").json()["history"]["points"]
        return next((point for point in points if point["ttft_s"] and point["generated_tokens"]), None)

    point = until(measured)
    assert point["workers"] == 2
    assert point["requests"] > 0
    assert http.get("/debug/fleet", params={"since": point["at"] + 1e6}).json()["placements"] == []
    assert http.get("/debug/fleet", params={"since": "now"}).status_code == 400
