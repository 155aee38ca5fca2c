"""More load than fits, in virtual time: how long the accepted wait, and tenants beside each other."""

from __future__ import annotations

from random import Random

import pytest
from quantiles import quantile
from stepped_fleet import Answer, SteppedFleet, poisson

from decodefleet.cluster.scheduling.config import SchedulingConfig

SEATS, WORKERS, STEP_S, TOKENS = 12, 2, 0.02, 40
CAPACITY = SEATS * WORKERS / (TOKENS * STEP_S)


def run(*loads: list[Answer], seats: int = SEATS, **config) -> list[Answer]:
    fleet = SteppedFleet(WORKERS, seats, STEP_S, SchedulingConfig(**config))
    return fleet.serve(answer for load in loads for answer in load)


def served(answers: list[Answer], tenant: str | None = None) -> list[float]:
    return [each.ttft for each in answers if each.refused is None and tenant in (None, each.tenant)]


@pytest.mark.parametrize("seed", range(2))
def test_the_wait_of_the_accepted_is_bounded_by_time(seed):
    """Five times what fits: no more wait than are served within the limit, though the queue is long."""
    limit = 1.0
    load = poisson(Random(seed), 5 * CAPACITY, 30.0, TOKENS)
    answers = run(load, max_queue=10_000, max_queue_wait_s=limit)
    waits = served(answers)
    # as many as fit are served
    assert len(waits) >= 0.95 * 30 * CAPACITY
    # once the pace is known; it is learned from the first seconds
    later = [each.ttft for each in answers if each.refused is None and each.asked > 5.0]
    assert quantile(later, 0.99) <= 1.4 * limit
    assert {each.refused for each in answers} == {None, "queue_full"}


@pytest.mark.parametrize("spread", [0.0, 0.5])
def test_a_crowd_that_is_served_within_the_limit_is_not_refused(spread):
    """All at once into an idle fleet, twice: that nothing ends for the first two seconds is no standstill."""
    rng, seats, count = Random(0), 64, 1000
    fleet = SteppedFleet(WORKERS, seats, STEP_S, SchedulingConfig(max_queue=2 * count, max_queue_wait_s=30.0))
    for _ in range(2):
        crowd = [
            Answer(fleet.now + number * 1e-4, "", round(100 * rng.uniform(1 - spread, 1 + spread)))
            for number in range(count)
        ]
        fleet.serve(crowd)
        assert all(each.refused is None for each in crowd)
        # it takes long enough for the prediction to matter
        assert max(each.ttft for each in crowd) > 12.0
        fleet.now += 5.0


@pytest.mark.parametrize("seed", range(2))
def test_the_accepted_wait_hardly_longer_than_at_capacity(seed):
    """Five times what fits comes on top of a steady load, into a short queue."""
    steady = poisson(Random(seed), CAPACITY, 40.0, TOKENS)
    alone = [each.ttft for each in run(steady, max_queue=8) if each.asked > 5.0 and each.refused is None]
    again = poisson(Random(seed), CAPACITY, 40.0, TOKENS)
    surplus = [each for each in poisson(Random(seed + 100), 4 * CAPACITY, 40.0, TOKENS) if each.asked > 5.0]
    crowd = run(again, surplus, max_queue=8)
    beside = [each.ttft for each in crowd if each.asked > 5.0 and each.refused is None]
    assert quantile(beside, 0.99) <= 1.5 * quantile(alone, 0.99)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("seats", "small_load", "seconds"), [(12, 0.1, 60.0), (48, 0.3, 20.0)])
def test_a_small_tenant_does_not_feel_a_large_one(seed, seats, small_load, seconds):
    """Beside one that offers three times what fits: its waits stay within 1.5 times those alone."""
    capacity = seats * WORKERS / (TOKENS * STEP_S)

    def load(times: float, seed: int, tenant: str) -> list[Answer]:
        return poisson(Random(seed), times * capacity, seconds, TOKENS, tenant)

    # a third tenant that was here and has gone takes nobody's share
    gone = [Answer(0.0, "gone", TOKENS)]
    alone = run(load(small_load, seed, "small"), seats=seats)
    small, large = load(small_load, seed, "small"), load(3.0, seed + 100, "large")
    beside = run(gone, small, large, seats=seats)
    assert all(each.refused is None for each in small)
    # once all seats are taken and given back for the first time
    late = [each.ttft for each in small if each.asked > 2.0]
    assert quantile(late, 0.95) <= 1.5 * quantile(served(alone), 0.95)
    # two seats of 24 or five of 96 are kept free, and a seat is empty for a step in forty
    tokens = sum(each.tokens for each in beside if each.ended is not None and each.ended <= seconds)
    assert tokens >= 0.85 * seconds * seats * WORKERS / STEP_S
