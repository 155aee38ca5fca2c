from __future__ import annotations

import io
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from decodefleet.cluster.bench.http import Exchange
from decodefleet.cluster.bench.load import Run
from decodefleet.cluster.bench.report import document, run_document, table
from decodefleet.cluster.bench.summary import Quantiles, quantile, summarize


@given(
    values=st.lists(st.floats(0, 1e6), min_size=1, max_size=50),
    share=st.sampled_from([0.0, 0.5, 0.95, 0.99, 1.0]),
)
def test_quantiles_are_numpys(values: list[float], share: float) -> None:
    assert quantile(sorted(values), share) == pytest.approx(float(np.quantile(values, share)))


def test_no_values_no_quantiles() -> None:
    assert Quantiles.of([]) is None


def answered(started: float, tokens: int, *, usage: bool = True) -> Exchange:
    """A token per second; the prompt has ten."""
    pieces = [
        (started + 1 + index, b'data: {"choices": [{"text": "a", "finish_reason": null}]}\n\n')
        for index in range(tokens)
    ]
    counts = {"prompt_tokens": 10, "completion_tokens": tokens, "prompt_tokens_details": {"cached_tokens": 5}}
    if usage:
        data = json.dumps({"choices": [], "usage": counts})
        pieces.append((started + tokens, f"data: {data}\n\n".encode()))
    return Exchange(started=started, ended=started + tokens, status=200, pieces=pieces)


def run(*exchanges: Exchange) -> Run:
    return Run(list(exchanges), duration_s=10.0, client_cpu_s=1.0, late=[0.0, 0.002], peak_in_flight=2)


def test_failures_count_in_nothing_but_errors() -> None:
    summary, outcomes = summarize(
        "rate 1/s",
        run(
            answered(0, 4),
            answered(1, 4),
            Exchange(status=429),
            Exchange(status=429),
            Exchange(failure="timeout"),
        ),
        [10] * 5,
    )
    assert (summary.requests, summary.succeeded) == (5, 2)
    assert summary.errors == {"HTTP 429": 2, "timeout": 1}
    assert (summary.input_tokens, summary.output_tokens, summary.cached_tokens) == (20, 8, 10)
    assert summary.output_tokens_per_s == pytest.approx(0.8)
    assert summary.requests_per_s == pytest.approx(0.2)
    assert summary.ttft is not None
    assert summary.ttft.p50 == pytest.approx(1000)
    assert summary.itl is not None
    assert summary.itl.max == pytest.approx(1000)
    assert summary.client_cpu == pytest.approx(0.1)
    assert len(outcomes) == 5


def test_one_answer_without_usage_makes_the_counts_an_estimate() -> None:
    summary, _ = summarize("x", run(answered(0, 4), answered(0, 3, usage=False)), [10, 10])
    assert summary.counted_from == "chunks"
    assert (summary.input_tokens, summary.output_tokens) == (20, 7)


def test_reports_hold_what_happened() -> None:
    summary, outcomes = summarize("rate 1/s", run(answered(0, 4), Exchange(status=503)), [10, 10])
    text = json.dumps(document({"date": "now"}, {"seed": "s"}, [run_document(summary, outcomes)]))
    loaded = json.loads(text)
    assert loaded["runs"][0]["errors"] == {"HTTP 503": 1}
    assert [request["error"] for request in loaded["runs"][0]["per_request"]] == [None, "HTTP 503"]
    assert loaded["runs"][0]["per_request"][0]["ttft_ms"] == 1000
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(table("title", [summary]))
    printed = console.export_text()
    assert "1 of 2" in printed
    assert "1 HTTP 503" in printed
    assert "late p99" in printed


def test_a_run_without_a_single_success_can_be_shown() -> None:
    summary, _ = summarize("c 1", run(Exchange(failure="connect")), [10])
    assert summary.ttft is None
    Console(quiet=True).print(table("title", [summary]))
