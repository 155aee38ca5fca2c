"""Five times the load that fits: some are served whole, the rest is told at once when to come again.

How long each of them waits is `tests/bench/overload.py`'s to measure.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from offered_load import Reply, offer_all, poisson

SEATS, TOKENS, STEP_S = 4, 20, 0.01
CAPACITY = SEATS / (TOKENS * STEP_S)
BODY = {"model": "tiny", "max_tokens": TOKENS, "ignore_eos": True}


@pytest.fixture(scope="module")
def narrow(make_stack: Callable[..., Any]) -> Any:
    """Seats for a few, and a queue for as many again."""
    return make_stack(workers=1, max_num_seqs=SEATS, step_s=STEP_S, scheduling={"max_queue": SEATS})


def idle(stack: Any) -> bool:
    core = stack.scheduler.core
    busy = any(stats.running or stats.waiting for stats in stack.stats())
    return not (busy or [*core.ledger] or [*core.queue])


def settle(stack: Any) -> None:
    give_up = time.monotonic() + 60
    while not idle(stack):
        assert time.monotonic() < give_up
        time.sleep(0.02)


def test_the_rest_is_refused_and_told_when_to_come_again(narrow: Any) -> None:
    rng = random.Random(5)
    replies: list[Reply] = asyncio.run(offer_all(narrow.url, poisson(rng, 5 * CAPACITY, 2.0, BODY)))
    counts = Counter(reply.status for reply in replies)
    assert set(counts) == {200, 429}
    assert counts[429] > counts[200]
    assert all(reply.whole for reply in replies if reply.status == 200)
    assert all(reply.retry_after for reply in replies if reply.status == 429)
    settle(narrow)
    narrow.scheduler.core.check_integrity()
    afterwards = asyncio.run(offer_all(narrow.url, poisson(rng, CAPACITY / 3, 1.0, BODY)))
    assert {reply.status for reply in afterwards} == {200}


def test_a_tenant_of_few_requests_is_served_beside_one_of_many(narrow: Any) -> None:
    rng = random.Random(6)
    few = poisson(rng, 0.3 * CAPACITY, 2.0, BODY, tenant="few")
    many = poisson(rng, 5 * CAPACITY, 2.0, BODY, tenant="many")
    replies: list[Reply] = asyncio.run(offer_all(narrow.url, [*few, *many]))
    settle(narrow)
    share = {
        tenant: sum(reply.status == 200 for reply in replies if reply.offer.tenant == tenant) / len(offers)
        for tenant, offers in (("few", few), ("many", many))
    }
    assert share["few"] > 2 * share["many"]
