"""Quantiles from buckets, objectives, balance."""

import numpy as np
import pytest

from decodefleet.cluster.simulate.outcome import Gaps, Objectives, Served, balance, hit_rate


def test_quantiles_of_gaps_are_within_their_buckets():
    values = np.random.default_rng(0).lognormal(-4, 1, 5000)
    gaps = Gaps()
    for value in values:
        gaps.add(value)
    expected = 1000 * np.quantile(values, [0.5, 0.9, 0.99])
    assert list(gaps.quantiles()) == pytest.approx(list(expected), rel=0.02)
    assert Gaps().quantiles() is None


def test_weights_of_gaps():
    gaps = Gaps()
    gaps.add(0.010, 89)
    gaps.add(0.100, 11)
    assert gaps.quantiles().p50 == pytest.approx(10, rel=0.01)
    assert gaps.quantiles().p90 == pytest.approx(100, rel=0.01)


def test_objectives_are_about_both():
    wanted = Objectives(ttft_s=1.0, tpot_s=0.1)
    assert wanted.met(Served(0, 0.9, 0.09, 1, 2, 0))
    assert wanted.met(Served(0, 0.9, None, 1, 1, 0))
    assert not wanted.met(Served(0, 1.1, 0.09, 1, 2, 0))
    assert not wanted.met(Served(0, 0.9, 0.11, 1, 2, 0))


def test_balance_and_hit_rate():
    assert balance([1.0, 1.0, 4.0]) == pytest.approx(2.0)
    assert balance([0.0, 0.0]) == 1.0
    assert hit_rate([Served(0, 1, 1, 100, 1, 50), Served(0, 1, 1, 300, 1, 0)]) == pytest.approx(0.125)
