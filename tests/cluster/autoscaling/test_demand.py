"""The requests of late, and how they grow."""

import pytest

from decodefleet.cluster.autoscaling.demand import MOST, SLOT_S, Demand, Trend, trend


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


def test_those_who_waited_are_put_where_they_belong(make):
    demand = Demand(keep_s=1e9)
    for at in (0.0, 20.0, 4.0, 21.0, 6.0):
        demand.add(make.asked(at, prefill=50, output=50))
    assert [one.at for one in demand.since(4.0)] == [4.0, 6.0, 20.0, 21.0]
    assert demand.work(-10.0, 29.0) == [0, 0, 200, 100, 0, 0, 200]


def worked(asked, now: float) -> list[int]:
    demand = Demand(keep_s=10.0)
    for one in asked:
        demand.add(one)
    return demand.work(0.0, now)


def test_work_by_slots(make):
    asked = [make.asked(float(at), prefill=60, output=40) for at in range(1000)]
    # of the last four minutes, though single requests are kept for less
    assert worked(asked, 1000.0) == [500] * 48
    assert worked(asked[:48], 48.0) == [500] * 9
    assert worked(asked[:3], 3.0) == []


def test_noise_has_no_slope(make):
    steady = [worked(make.poisson(lambda at: 10.0, 240.0, seed), 240.0) for seed in range(40)]
    grown = [trend(work, 60.0, 60.0).growth for work in steady]
    assert max(grown) < 1.2
    assert sum(grown) / len(grown) < 1.02


def test_a_ramp_is_continued(make):
    """From 10 to 34 a second in 240 s: 40 a second a minute later, 1.29 times those of the last minute."""
    found = trend(worked(make.poisson(lambda at: 10 + at / 10, 240.0), 240.0), 60.0, 60.0)
    assert found.growth == pytest.approx(1.29, rel=0.05)
    assert found.falls == 0.0


def test_decline_is_told_and_not_continued(make):
    found = trend(worked(make.poisson(lambda at: 34 - at / 10, 240.0), 240.0), 60.0, 60.0)
    assert found.growth == pytest.approx(1.0, abs=0.05)
    assert found.falls > 0.9


def test_noise_is_no_sure_fall(make):
    """Above nothing once in twenty times, and then by little."""
    steady = [worked(make.poisson(lambda at: 10.0, 240.0, seed), 240.0) for seed in range(100)]
    falls = [trend(work, 60.0, 60.0).falls for work in steady]
    assert sum(one > 0 for one in falls) <= 10
    assert sum(falls) / len(falls) < 0.02


def test_a_chance_peak_is_not_expected_to_last(make):
    """Ten a second, and the last minute by chance the highest of 40: less is expected than it had."""
    steady = [worked(make.poisson(lambda at: 10.0, 240.0, seed), 240.0) for seed in range(200)]
    found = []
    for first in range(0, 200, 40):
        peak = max(steady[first : first + 40], key=lambda work: sum(work[-12:]) / sum(work))
        found.append(trend(peak, 60.0, 0.0).growth)
    assert sum(found) / len(found) < 0.99


@pytest.mark.parametrize(
    ("before", "after", "since"), [(100, 1, 120), (100, 1, 60), (100, 10, 120), (100, 50, 90)]
)
def test_a_cliff_is_not_continued_below_what_is_left(before, after, since):
    """What the whole last minute had comes again, or little less, however steep the fall before it was."""
    slots = round(240 / SLOT_S)
    work = [before] * (slots - round(since / SLOT_S)) + [after] * round(since / SLOT_S)
    assert 0.9 <= trend(work, 60.0, 60.0).growth <= 1.0
    # in the middle of the last minute: less, but never so little that time stands still
    work = [before] * (slots - 6) + [0] * 6
    assert 0.9 <= trend(work, 60.0, 60.0).growth < 2.0


def test_a_burst_long_ago_takes_nothing_from_now():
    work = [1000] * 4 + [100] * 44
    assert 0.9 <= trend(work, 60.0, 60.0).growth <= 1.0


def test_a_fall_is_sure_only_of_a_whole_past(make):
    """With few sums a line leaves next to nothing over, by chance."""
    short = [worked(make.poisson(lambda at: 10.0, 100.0, seed), 100.0) for seed in range(100)]
    assert all(trend(work, 60.0, 60.0).falls == 0 for work in short)


def test_a_step_is_believed(make):
    """Twice as much for a minute: that it stays so, or more."""
    work = worked(make.poisson(lambda at: 10.0 if at < 180 else 20.0, 240.0), 240.0)
    assert trend(work, 60.0, 60.0).growth > 0.95


def test_a_short_past_has_no_trend(make):
    assert trend(worked(make.poisson(lambda at: at / 2, 59.0), 59.0), 60.0, 60.0) == Trend()
    assert trend([], 60.0, 60.0) == Trend()
    assert trend([0] * 20, 60.0, 60.0) == Trend()
