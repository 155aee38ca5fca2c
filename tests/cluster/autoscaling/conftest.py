"""Factories for tests of autoscaling, and a fleet without requests that follows an autoscaler."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from random import Random
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from decodefleet.cluster.autoscaling.autoscaler import Autoscaler
from decodefleet.cluster.autoscaling.config import ScalingConfig
from decodefleet.cluster.autoscaling.demand import Asked
from decodefleet.cluster.autoscaling.replay import WorkerModel
from decodefleet.worker.protocol import StepTime

# a request of 1,000 tokens keeps a worker busy for half a second
STEP = StepTime(base=0.01, prefill_token=5e-4, kv_token=1e-8, sequence=1e-4)
MODEL = WorkerModel(STEP, kv_tokens=200_000, step_target_s=0.0)
STARTUP_S = 60.0


class Point(NamedTuple):
    at: float
    target: int
    serving: int
    wanted: int


def make_config(**changes) -> ScalingConfig:
    return ScalingConfig(**{"min_workers": 1, "max_workers": 40, "ttft_target_s": 5.0} | changes)


def make_asked(at: float = 0.0, prefill: int = 1000, context: int = 1000, output: int = 50) -> Asked:
    return Asked(at, prefill, context, output)


def poisson(rate: Callable[[float], float], until: float, seed: int = 0) -> Iterator[Asked]:
    """Requests of a rate that changes with time."""
    rng, at = Random(seed), 0.0
    while at < until:
        at += rng.expovariate(max(rate(at), 1e-3))
        yield make_asked(at, rng.randrange(500, 1500))


def follow(rate: Callable[[float], float], until: float, seed: int = 0, **changes) -> list[Point]:
    """Targets every 15 s, of workers that serve a minute after they were asked for."""
    config = make_config(**changes)
    autoscaler, requests = Autoscaler(config), poisson(rate, until, seed)
    upcoming = next(requests, None)
    target = serving = max(1, config.min_workers)
    due: list[float] = []
    points, now = [], 0.0
    while now < until:
        now += 15.0
        while upcoming is not None and upcoming.at <= now:
            autoscaler.asked(upcoming)
            upcoming = next(requests, None)
        while due and due[0] <= now:
            del due[0]
            serving += 1
        decision = autoscaler.decide(
            now, target=target, workers=serving, open_requests=1, backlog_s=0.0, model=MODEL
        )
        due += [now + STARTUP_S] * max(0, decision.target - target)
        for _ in range(max(0, target - decision.target)):
            if due:
                due.pop()
            else:
                serving -= 1
        target = decision.target
        points.append(Point(now, target, serving, decision.wanted.workers))
    return points


def turns(points: list[Point]) -> int:
    """Changes of direction."""
    moves = [after.target - before.target for before, after in pairwise(points)]
    signs = [move > 0 for move in moves if move]
    return sum(before != after for before, after in pairwise(signs))


@pytest.fixture
def make() -> SimpleNamespace:
    return SimpleNamespace(
        config=make_config,
        asked=make_asked,
        poisson=poisson,
        follow=follow,
        turns=turns,
        model=MODEL,
        step=STEP,
        startup_s=STARTUP_S,
    )
