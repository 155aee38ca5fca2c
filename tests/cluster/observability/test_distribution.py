"""Buckets against Prometheus' own, and quantiles against numpy on the values themselves."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram

from decodefleet.cluster.observability.distribution import Distribution, quantile

BOUNDS = (0.1, 0.5, 1.0, 5.0)


@given(st.lists(st.sampled_from([0.0, 0.05, 0.1, 0.3, 0.5, 0.7, 1.0, 4.9, 5.0, 60.0])))
def test_buckets_are_those_of_prometheus(values):
    ours = Distribution(BOUNDS)
    theirs = Histogram("x", "X.", buckets=BOUNDS, registry=CollectorRegistry())
    for value in values:
        ours.observe(value)
        theirs.observe(value)
    samples = {sample.labels.get("le"): sample.value for sample in next(iter(theirs.collect())).samples}
    cumulated = [sum(ours.counts[: end + 1]) for end in range(len(BOUNDS) + 1)]
    assert cumulated == [samples[str(end)] for end in BOUNDS] + [samples["+Inf"]]
    assert ours.total == pytest.approx(sum(values))


@pytest.mark.parametrize("q", [0.1, 0.5, 0.95, 0.99])
def test_quantiles_are_right_to_a_bucket(q):
    rng = np.random.default_rng(3)
    values = rng.exponential(1.0, 5000)
    bounds = tuple(np.arange(0.05, 20, 0.05))
    measured = Distribution(bounds)
    for value in values:
        measured.observe(value)
    assert quantile(bounds, measured.counts, q) == pytest.approx(np.quantile(values, q), abs=0.06)


def test_quantiles_at_the_edges():
    assert quantile(BOUNDS, [0, 0, 0, 0, 0], 0.5) is None
    # all in one bucket: linear inside it
    assert quantile(BOUNDS, [0, 4, 0, 0, 0], 0.5) == pytest.approx(0.3)
    assert quantile(BOUNDS, [2, 0, 0, 2, 0], 0.5) == pytest.approx(0.1)
    # beyond the last bound nothing is known
    assert quantile(BOUNDS, [0, 0, 0, 0, 3], 0.5) == 5.0
