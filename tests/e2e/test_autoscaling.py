"""A live server whose workers follow the load: one, three, one, none, and back, with no request lost.

Pretended engines with steps that take time; Ray Serve starts and stops them as it would real ones.
"""

from __future__ import annotations

import asyncio
import os
import time

import httpx
import pytest
from served import Served

PROMPT = list(range(1, 401))


@pytest.fixture
def served(tmp_path):
    """0.4 s of prefill per request, against a second for the first token."""
    server = Served(
        tmp_path / "serve.log",
        "smollm2-135m",
        *("--fake", "--fake-prefill-token-s", "0.001", "--max-workers", "3", "--min-workers", "0"),
        *("--ttft-target-ms", "1000", "--scale-in-s", "10", "--idle-s", "15", "--log-level", "info"),
    )
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()


async def load(client: httpx.AsyncClient, rate: float, seconds: float) -> list[int]:
    """Answers' states of an open loop."""

    async def ask(number: int) -> int:
        await asyncio.sleep(number / rate)
        prompt = [1 + (number + token) % 1000 for token in PROMPT]
        body = {"model": "smollm2-135m", "prompt": prompt, "max_tokens": 8, "ignore_eos": True}
        answer = await client.post("/v1/completions", json=body)
        return answer.status_code

    return list(await asyncio.gather(*(ask(number) for number in range(int(rate * seconds)))))


async def until_ranks(served: Served, count: int, limit_s: float = 150.0) -> float:
    """Seconds until so many workers run."""
    began = time.monotonic()
    while len(served.census()["rank"]) != count:
        assert time.monotonic() - began < limit_s, f"{len(served.census()['rank'])} workers, not {count}"
        await asyncio.sleep(0.5)
    return time.monotonic() - began


@pytest.mark.slow
@pytest.mark.skipif(
    "DECODEFLEET_LONG" not in os.environ, reason="takes five minutes: DECODEFLEET_LONG=1 runs it"
)
@pytest.mark.timeout(600)
async def test_one_three_one_none_and_back(served):
    async with httpx.AsyncClient(base_url=served.url, timeout=300, trust_env=False) as client:
        await until_ranks(served, 1)
        states = await load(client, rate=4.0, seconds=60.0)
        assert set(states) == {200}
        assert len(served.census()["rank"]) >= 2
        # a little load is left while the others go
        quiet = asyncio.create_task(load(client, rate=0.5, seconds=90.0))
        await until_ranks(served, 1)
        assert set(await quiet) == {200}
        await until_ranks(served, 0)
        assert served.answers("/ready")
        assert set(await load(client, rate=5.0, seconds=1.0)) == {200}
        await until_ranks(served, 1)
