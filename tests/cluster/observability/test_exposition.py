"""Prometheus text read as `prometheus_client` reads it, whatever stands in labels and help."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from decodefleet.cluster.observability.exposition import parse

LABELS = st.text(st.characters(exclude_categories=("Cs",)) | st.sampled_from('"\\\n,={} #\x85\u2028'))


def read_by_prometheus(text: str) -> dict[str, dict]:
    found: dict[str, dict] = {}
    for family in text_string_to_metric_families(text):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        samples = {(sample.name, tuple(sample.labels.items())): sample.value for sample in family.samples}
        found[name] = {"kind": family.type, "documentation": family.documentation, "samples": samples}
    return found


def read_by_us(text: str) -> dict[str, dict]:
    return {
        name: {"kind": family.kind, "documentation": family.documentation, "samples": family.samples}
        for name, family in parse(text).families.items()
    }


@settings(max_examples=60)
@given(LABELS, LABELS, st.floats(allow_nan=False, min_value=0), LABELS)
def test_as_prometheus_reads_it(one: str, other: str, value: float, documentation: str) -> None:
    registry = CollectorRegistry()
    Counter("a", f"A{documentation}.", ("x", "y"), registry=registry).labels(one, other).inc(value)
    Gauge("b", "B.", ("x",), registry=registry).labels(other).set(-value)
    Histogram("c_seconds", "C.", ("x",), registry=registry).labels(one).observe(value)
    Counter("empty", "Never.", ("x",), registry=registry)
    text = generate_latest(registry).decode()
    assert read_by_us(text) == read_by_prometheus(text)
    # and what we write of it says the same
    again = parse(text).render()
    assert read_by_us(again) == read_by_us(text)


@pytest.mark.parametrize(
    "text",
    [
        "# TYPE x gauge\nx{",
        "# TYPE x gauge\nx 1 2 3 4",
        "# TYPE x gauge\nx{a=b} 1",
        '# TYPE x gauge\nx{a="b" 1',
        '# TYPE x gauge\nx{a="b"c="d"} 1',
        "# TYPE x gauge\nx one",
        "y 1",
        "\x00",
    ],
)
def test_what_is_no_metric_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse(text)


def test_what_is_not_a_number_is_left_out() -> None:
    parsed = parse("# HELP x X.\n# TYPE x gauge\nx NaN\n")
    assert parsed.families["x"].samples == {}
