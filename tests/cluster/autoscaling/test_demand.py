"""The requests of late, and how they grow."""

import pytest

from decodefleet.cluster.autoscaling.demand import MOST, Demand, growth


def test_old_requests_are_forgotten(make):
    demand = Demand(keep_s=10.0)
    for at in range(30):
        demand.add(make.asked(float(at)))
    assert [one.at for one in demand.since(0.0)] == [float(at) for at in range(19, 30)]
    assert [one.at for one in demand.since(27.5)] == [28.0, 29.0]


def test_memory_is_bounded(make):
    demand = Demand(keep_s=1e9)
    for at in range(MOST + 10):
        demand.add(make.asked(float(at)))
    assert len(demand) == MOST
    assert demand.last_at == MOST + 9


def test_noise_is_no_growth(make):
    for seed in range(20):
        asked = list(make.poisson(lambda at: 10.0, 90.0, seed))
        assert growth(asked, 90.0, 60.0) < 1.2


def test_a_ramp_is_continued(make):
    """From 10 to 30 a second in 100 s: 42 a second a minute later, 2.1 times the mean."""
    asked = list(make.poisson(lambda at: 10 + at / 5, 100.0))
    assert growth(asked, 100.0, 60.0) == pytest.approx(2.1, rel=0.2)


def test_decline_is_not_forecast(make):
    asked = list(make.poisson(lambda at: 30 - at / 5, 100.0))
    assert growth(asked, 100.0, 60.0) == 1.0
    assert growth([], 100.0, 60.0) == 1.0
