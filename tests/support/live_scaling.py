"""A live fleet whose workers follow the load: one, three, one, none, and one again.

Pretended engines with steps that take time; Ray Serve starts and stops them as it would real ones.
`follow_load` asserts how many there are, and returns what its clients and an onlooker saw.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from offered_load import Offer, Reply, offer_all
from served import Served

MODEL = "smollm2-135m"
PROMPT_TOKENS = 400
# 0.4 s of prefill per request, against a second for the first token: a busy minute keeps 2.2 workers occupied
OPTIONS = (
    *("--fake", "--fake-prefill-token-s", "0.001", "--max-workers", "3", "--min-workers", "0"),
    *("--ttft-target-ms", "1000", "--scale-in-s", "10", "--idle-s", "15"),
)
BUSY, CALM, WAKING = ("busy", 5.5, 60.0), ("calm", 0.5, 90.0), ("to none", 5.0, 1.0)
LOOK_S = 1.0
# the busy minute stays in what is replayed for three
LIMIT_S = 240.0


@dataclass
class Seen:
    """workers: (seconds, how many run), all along. parts: each load's replies, with when they were due."""

    began: float = field(default_factory=time.monotonic)
    workers: list[tuple[float, int]] = field(default_factory=list)
    parts: dict[str, list[tuple[float, Reply]]] = field(default_factory=dict)

    @property
    def now(self) -> float:
        return time.monotonic() - self.began

    @property
    def replies(self) -> list[tuple[float, Reply]]:
        return [reply for part in self.parts.values() for reply in part]


def lost(replies: list[tuple[float, Reply]]) -> int:
    return sum(reply.status != 200 or not reply.whole for _, reply in replies)


@contextlib.contextmanager
def scaled_fleet(log: Path) -> Iterator[Served]:
    served = Served(log, MODEL, *OPTIONS)
    try:
        served.wait_ready()
        yield served
    finally:
        if served.process.poll() is None:
            served.stop()


async def follow_load(served: Served) -> Seen:
    """Some five minutes. Raises AssertionError where the fleet does not come to the size it should have."""
    seen = Seen()
    async with _watched(served, seen):
        await _until(seen, 1)
        await _load(served, seen, *BUSY)
        assert max(count for _, count in seen.workers) == 3, seen.workers
        # a little load is left while the others go
        calm = asyncio.create_task(_load(served, seen, *CALM))
        await _until(seen, 1)
        await calm
        await _until(seen, 0)
        assert served.answers("/ready")
        await _load(served, seen, *WAKING)
        await _until(seen, 1)
    return seen


@contextlib.asynccontextmanager
async def _watched(served: Served, seen: Seen) -> AsyncIterator[None]:
    async def watch() -> None:
        while True:
            count = len((await asyncio.to_thread(served.census))["rank"])
            seen.workers.append((seen.now, count))
            await asyncio.sleep(LOOK_S)

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()


async def _load(served: Served, seen: Seen, name: str, rate: float, seconds: float) -> None:
    """An open loop, at even distances; no two prompts begin alike."""
    began, rng = seen.now, random.Random(seen.now)
    fixed = {"model": MODEL, "max_tokens": 8, "ignore_eos": True, "stream": True}
    prompts = ([rng.randrange(1, 1000) for _ in range(PROMPT_TOKENS)] for _ in range(int(rate * seconds)))
    offers = [Offer(number / rate, fixed | {"prompt": prompt}) for number, prompt in enumerate(prompts)]
    replies = await offer_all(served.url, offers)
    seen.parts[name] = [(began + reply.offer.at_s, reply) for reply in replies]


async def _until(seen: Seen, count: int) -> None:
    began = seen.now
    while not seen.workers or seen.workers[-1][1] != count:
        assert seen.now - began < LIMIT_S, f"not {count} workers after {LIMIT_S:g} s: {seen.workers}"
        await asyncio.sleep(LOOK_S / 2)
