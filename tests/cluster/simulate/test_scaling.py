"""Fleets that grow and shrink in simulation, and the rules that ours is compared with."""

import pytest

from decodefleet.cluster.autoscaling.config import ScalingConfig
from decodefleet.cluster.autoscaling.replay import WorkerModel
from decodefleet.cluster.autoscaling.watch import Observed
from decodefleet.cluster.simulate.policies import find_policy
from decodefleet.cluster.simulate.scaling import Planner, ScaledFleet, ServeDefault, WaitingRule
from decodefleet.cluster.simulate.simulation import Simulation

CONFIG = ScalingConfig(min_workers=1, max_workers=8)


class Script:
    """Targets by time."""

    name = "script"

    def __init__(self, *steps: tuple[float, int]) -> None:
        self._steps = steps

    def target(self, simulation, seen, target):
        return [workers for at, workers in self._steps if at <= simulation.events.now][-1]


def run(make, scaler, arrivals, startup_s: float = 10.0, first: int = 1):
    simulation = Simulation(arrivals, make.blueprint(), find_policy("cost"), max_queue=10**9)
    fleet = ScaledFleet(simulation, scaler, first=first, startup_s=startup_s, interval_s=1.0)
    simulation.run()
    simulation.check_integrity()
    return simulation, fleet


def steady(make, until: float):
    return [make.arrival(prompt=100, output=20, at=float(at)) for at in range(int(until))]


def test_workers_come_after_their_start_and_go_when_they_are_done(make):
    simulation, fleet = run(make, Script((0, 1), (5, 3), (30, 1)), steady(make, 50.0))
    serving = {point.at: point.workers for point in fleet.timeline}
    assert (serving[14.0], serving[16.0], serving[32.0]) == (1, 3, 1)
    assert {round(member.since) for member in simulation.retired} <= {0, 5}
    assert all(30 <= member.until < 33 for member in simulation.retired)
    assert len(simulation.recorder.served) == 50


def test_what_has_not_come_is_sent_back_first_and_is_paid_until_then(make):
    simulation, fleet = run(make, Script((0, 1), (5, 3), (8, 1)), steady(make, 30.0))
    assert max(point.workers for point in fleet.timeline) == 1
    assert simulation.wasted_s == pytest.approx(6.0)
    assert simulation.retired == []


def seen(open_requests: int = 0, waiting: int = 0) -> Observed:
    return Observed(1, open_requests, waiting, 0.0, None)


class At:
    def __init__(self, now: float) -> None:
        self.events = self
        self.now = now


def test_serves_default_waits_for_both_directions():
    scaler, target, changes = ServeDefault(CONFIG), 1, {}
    for now in range(0, 1000, 5):
        new = scaler.target(At(float(now)), seen(open_requests=8 if now < 100 else 0), target)
        if new != target:
            changes[now] = target = new
    # 8 over 2; then the mean of the last 30 s falls, and ten minutes go by
    assert changes[30] == 4
    assert min(now for now in changes if now > 30) >= 700
    assert target == 1


def test_waiting_rule_counts_those_who_wait():
    scaler = WaitingRule(CONFIG)
    assert scaler.target(At(0.0), seen(waiting=11), 1) == 3
    assert scaler.target(At(5.0), seen(waiting=40), 3) == 3
    assert scaler.target(At(15.0), seen(waiting=0), 3) == 3
    assert scaler.target(At(316.0), seen(waiting=0), 3) == 1


def test_planner_orders_in_time(make):
    """One request of 0.51 s each second, and five a second from 60 s to 90 s."""
    model = WorkerModel(make.cost.linear, 16_000, 0.0)
    arrivals = [make.arrival(prompt=5000, output=1, at=float(at)) for at in range(120)]
    arrivals += [make.arrival(prompt=5000, output=1, at=60 + at / 4) for at in range(120)]
    planner = Planner(sorted(arrivals), model, CONFIG, startup_s=20.0)
    assert planner.needs[0] == planner.needs[1] == 1
    assert planner.needs[2] >= 3
    assert planner.target(At(30.0), seen(), 1) == 1
    assert planner.target(At(40.0), seen(), 1) == planner.needs[2]
