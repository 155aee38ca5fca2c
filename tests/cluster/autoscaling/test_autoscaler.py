"""Closed loops on synthetic load: step, ramp, spike, sine, noise; workers take a minute to serve."""

from math import pi, sin
from random import Random

import pytest

from decodefleet.cluster.autoscaling.autoscaler import Autoscaler


def noisy(rate: float, seed: int):
    """Another level within ±20 % every 20 s."""
    rng = Random(seed)
    levels = [rate * rng.uniform(0.8, 1.2) for _ in range(200)]
    return lambda at: levels[int(at // 20)]


@pytest.mark.parametrize(("rate", "seeds"), [(6.0, 20), (8.0, 8)])
def test_noise_does_not_swing_it(make, rate, seeds):
    """Two turns in ten minutes at most, whatever the seed, and fewer than one on average."""
    turns = []
    for seed in range(seeds):
        points = [point for point in make.follow(noisy(rate, seed), 1800.0, seed) if point.at > 300]
        assert all(rate / 2 <= point.target <= rate for point in points)
        turns.append(make.turns(points) / 2.5)
    assert sum(turns) / len(turns) < 1
    assert max(turns) <= 2


def test_a_sure_fall_is_followed_sooner_than_noise(make):
    """Half the load from one minute to the next: a worker goes long before the hold is over."""
    points = make.follow(lambda at: 9.0 if at < 600 else 3.0, 1200.0, hold_s=600.0)
    before, after = (next(point for point in points if point.at == at) for at in (600.0, 1050.0))
    assert after.target < before.target


def test_step_up_and_down(make):
    points = make.follow(lambda at: 9.0 if 300 <= at < 900 else 1.0, 1800.0)
    by_time = {point.at: point for point in points}
    before, after, end = by_time[285.0], by_time[600.0], by_time[1785.0]
    assert before.target <= 2
    assert after.serving >= 6
    # within the window and a worker's start
    assert by_time[300 + 90 + 60.0].serving >= 5
    assert end.target <= 2
    assert make.turns(points) <= 3


def test_ramp_is_followed(make):
    """From 1 to 10 a second in 15 minutes: what serves stays enough for what comes."""
    points = make.follow(lambda at: min(10.0, 1 + max(0.0, at - 200) / 100), 1300.0)
    late = [point for point in points if point.at > 300 and point.serving < point.wanted - 1]
    assert len(late) <= 0.05 * len(points)


def test_spike_passes(make):
    """20 s of ten times the load: some workers are ordered, and are gone ten minutes later."""
    points = make.follow(lambda at: 12.0 if 600 <= at < 620 else 1.2, 1500.0)
    assert max(point.target for point in points) <= 12
    assert points[-1].target <= 2
    assert make.turns(points) <= 3


def test_sine_is_followed_without_extra_swings(make):
    """A period of 20 minutes has two turns."""
    points = make.follow(lambda at: 5 + 4 * sin(2 * pi * at / 1200), 3600.0)
    assert make.turns([point for point in points if point.at > 300]) <= 8
    assert {point.target for point in points} >= {3, 6}


def test_nothing_is_let_go_while_workers_are_to_come(make):
    autoscaler = Autoscaler(make.config())
    held = [
        autoscaler.decide(now, target=4, workers=3, open_requests=1, backlog_s=0.0, model=make.model).held
        for now in (0.0, 200.0, 290.0, 310.0)
    ]
    assert held == ["pending"] * 3 + [None]


def test_nothing_is_let_go_by_one_who_has_just_begun(make):
    autoscaler = Autoscaler(make.config(hold_s=100.0))

    def decide(now: float):
        return autoscaler.decide(now, target=4, workers=4, open_requests=0, backlog_s=0.0, model=make.model)

    assert (decide(0.0).target, decide(0.0).held) == (4, "young")
    assert decide(99.0).target == 4
    assert decide(101.0).target == 1


def test_a_rise_is_not_taken_back_twice_in_a_short_time(make):
    """Two backlogs 150 s apart: the second's workers stay until 2.5 holds after the first's went."""
    autoscaler, target, moves = Autoscaler(make.config(hold_s=100.0)), 1, []
    for second in range(5, 700, 5):
        now = float(second)
        autoscaler.asked(make.asked(now - 1.0))
        backlog_s = 100.0 if second in (150, 300) else 0.0
        decision = autoscaler.decide(
            now, target=target, workers=target, open_requests=1, backlog_s=backlog_s, model=make.model
        )
        if decision.target != target:
            moves.append((now, decision.target))
        target = decision.target
    assert moves == [(150.0, 4), (255.0, 1), (300.0, 4), (505.0, 1)]


def test_starts_are_timed(make):
    autoscaler = Autoscaler(make.config(startup_s=60.0))
    ask = {"open_requests": 1, "backlog_s": 0.0, "model": make.model}
    for second in range(60):
        for _ in range(6):
            autoscaler.asked(make.asked(float(second)))
    assert autoscaler.decide(60.0, target=1, workers=1, **ask).target > 1
    autoscaler.decide(80.0, target=4, workers=4, **ask)
    assert autoscaler.startup_s == pytest.approx(40.0)


def test_to_zero_and_back(make):
    autoscaler = Autoscaler(make.config(min_workers=0, idle_s=300.0, hold_s=60.0))

    def decide(now: float, workers: int, open_requests: int) -> int:
        return autoscaler.decide(
            now, target=workers, workers=workers, open_requests=open_requests, backlog_s=0.0, model=make.model
        ).target

    autoscaler.asked(make.asked(0.0))
    # one request in 15 s is no reason for more
    assert [decide(now, 1, 0) for now in (15.0, 100.0, 299.0)] == [1, 1, 1]
    assert decide(301.0, 1, 0) == 0
    assert decide(400.0, 0, 0) == 0
    assert decide(405.0, 0, 1) == 1
