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


async def ask(client: httpx.AsyncClient, number: int, rng: random.Random) -> str:
    """One request; a third of them go away at some point of it. Answers how it ended."""
    body = {
        "model": "tiny",
        "prompt": f"Request {number} says: " + "all work and no play, " * rng.randrange(1, 12),
        "max_tokens": rng.randrange(4, 40),
        "ignore_eos": True,
        "stream": rng.random() < 0.7,
        "n": 3 if rng.random() < 0.3 else 1,
    }
    leaves_after = rng.choice((0.0, 0.01, 0.05, 0.2, 0.5)) if number % 3 == 0 else None
    try:
        async with asyncio.timeout(leaves_after):
            response = await client.post("/v1/completions", json=body)
    except TimeoutError:
        return "left"
    assert response.status_code == 200, response.text
    if body["stream"]:
        assert response.text.endswith("data: [DONE]\n\n")
        assert "error" not in response.text
    return "answered"


async def one_round(url: str, seed: int) -> list[str]:
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


@pytest.mark.parametrize("round_number", range(ROUNDS))
def test_everything_comes_back(crowded: Any, round_number: int) -> None:
    ends = asyncio.run(one_round(crowded.url, round_number))
    assert ends.count("answered") >= REQUESTS * 2 // 3
    assert ends.count("left") > REQUESTS // 10
    give_up = time.monotonic() + 60
    while (left := residue(crowded)) and time.monotonic() < give_up:
        time.sleep(0.05)
    assert left == []
    crowded.scheduler.core.check_integrity()
