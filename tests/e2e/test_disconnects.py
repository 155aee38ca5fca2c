"""Clients that go away in any state give back every block, every reservation and every place in a queue."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

ROUNDS = 3
REQUESTS = 200


@pytest.fixture(scope="module")
def crowded(make_stack: Callable[..., Any]) -> Any:
    """Few seats: most requests wait in the scheduler's queue."""
    return make_stack(workers=2, max_num_seqs=8, step_s=0.002, blocks=600)


async def ask(client: httpx.AsyncClient, number: int, rng: random.Random) -> int:
    """One request; a third of them go away at some point of it. Answers how many sequences it was given."""
    leaves_after = rng.choice((0.0, 0.01, 0.05, 0.2, 0.5)) if number % 3 == 0 else None
    n = 3 if rng.random() < 0.3 else 1
    body = {
        "model": "tiny",
        "prompt": f"Request {number} says: " + "all work and no play, " * rng.randrange(1, 12),
        # of one that leaves more than can be generated until then
        "max_tokens": rng.randrange(4, 40) if leaves_after is None else 1500,
        "ignore_eos": True,
        "stream": rng.random() < 0.7,
        "n": n,
    }
    try:
        async with asyncio.timeout(leaves_after):
            response = await client.post("/v1/completions", json=body)
    except TimeoutError:
        return 0
    assert response.status_code == 200, response.text
    if body["stream"]:
        assert response.text.endswith("data: [DONE]\n\n")
        assert "error" not in response.text
    return n


async def one_round(url: str, seed: int) -> list[int]:
    rng = random.Random(seed)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=120) as client:
        numbers = range(seed * REQUESTS, (seed + 1) * REQUESTS)
        return await asyncio.gather(*(ask(client, number, rng) for number in numbers))


def residue(stack: Any) -> list[str]:
    """What is not back yet."""
    core = stack.scheduler.core
    left = [f"reservation {held.key}" for held in core.ledger]
    left += [f"waiter {place}" for place in [*core.queue]]
    for stats in stack.stats():
        if stats.running or stats.waiting or stats.free_blocks + stats.cached_blocks != stats.total_blocks:
            left.append(str(stats))
    in_flight = stack.router.metrics.in_flight._value.get()
    return left if in_flight == 0 else [*left, f"{in_flight} in flight"]


def generated_whole(stack: Any) -> int:
    return sum(stats.finished.get("length", 0) for stats in stack.stats())


def missing(stack: Any, wanted: int) -> list[str]:
    """More than wanted are sequences of nobody that were computed to their ends."""
    whole = generated_whole(stack)
    return [] if whole == wanted else [f"{whole} generated whole, not {wanted}"]


@pytest.mark.parametrize("round_number", range(ROUNDS))
def test_everything_comes_back(crowded: Any, round_number: int) -> None:
    before = generated_whole(crowded)
    given = asyncio.run(one_round(crowded.url, round_number))
    assert REQUESTS // 10 < given.count(0) <= REQUESTS // 3 + 1
    give_up = time.monotonic() + 60
    # what a worker has finished is told with its next report
    while (left := residue(crowded) or missing(crowded, before + sum(given))) and time.monotonic() < give_up:
        time.sleep(0.05)
    assert left == []
    crowded.scheduler.core.check_integrity()
