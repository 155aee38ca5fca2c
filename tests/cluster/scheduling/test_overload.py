"""More load than fits, in virtual time: how long the accepted wait, and tenants beside each other."""

from __future__ import annotations

from random import Random

import pytest
from stepped_fleet import Answer, SteppedFleet, poisson, quantile

from decodefleet.cluster.scheduling.config import SchedulingConfig

SEATS, WORKERS, STEP_S, TOKENS = 12, 2, 0.02, 40
CAPACITY = SEATS * WORKERS / (TOKENS * STEP_S)


def run(*loads: list[Answer], **config) -> list[Answer]:
    fleet = SteppedFleet(WORKERS, SEATS, STEP_S, SchedulingConfig(**config))
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


@pytest.mark.parametrize("seed", range(2))
def test_a_small_tenant_does_not_feel_a_large_one(seed):
    """Beside thirty times its load, three times what fits: its waits stay within 1.5 times those alone."""
    rate = 0.1 * CAPACITY
    alone = run(poisson(Random(seed), rate, 40.0, TOKENS, "small"))
    small = poisson(Random(seed), rate, 40.0, TOKENS, "small")
    large = poisson(Random(seed + 100), 30 * rate, 40.0, TOKENS, "large")
    beside = run(small, large)
    assert all(each.refused is None for each in small)
    assert quantile(served(beside, "small"), 0.95) <= 1.5 * quantile(served(alone), 0.95)
    # what is kept free for it is a seat of twelve
    tokens = sum(each.tokens for each in beside if each.ended is not None and each.ended <= 40.0)
    assert tokens >= 0.85 * 40 * SEATS * WORKERS / STEP_S
