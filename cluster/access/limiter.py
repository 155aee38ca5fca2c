"""Holds tenants to their limits: rates over all routers by Redis, what runs at once in each router.

Where Redis is away, slow, or not configured, each router goes by buckets of its own: a tenant then gets at
most its rate once per router, and nobody waits for Redis. Knows no HTTP and nothing of what is generated.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from redis.exceptions import RedisError

from . import buckets
from .buckets import Bucket
from .keys import Grant

log = logging.getLogger(__name__)

KEY = "decodefleet:limits"
ANSWER_S = 0.25
# after a failure Redis is left alone for so long
REST_S = 5.0
# what may be taken in any case: it was used already
IN_ANY_CASE = -1e15


class LimitReached(Exception):
    """limit: the field of `Limits` that says so. retry_after_s: when to try again."""

    def __init__(self, limit: str, allowed: float, retry_after_s: float) -> None:
        super().__init__(f"{limit} of your tenant is {allowed:g}")
        self.limit = limit
        self.retry_after_s = retry_after_s


@dataclass(frozen=True)
class Draw:
    """From one bucket: `needed` must be there, `amount` is taken."""

    limit: str
    per_minute: float
    needed: float
    amount: float


class Limiter:
    """Used by one event loop. redis: a client of redis.asyncio, or None. routers: how many there are now."""

    def __init__(
        self,
        redis: Any = None,
        *,
        routers: Callable[[], int] = lambda: 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._script = redis.register_script(buckets.SCRIPT) if redis is not None else None
        self._routers = routers
        self._clock = clock
        self._rests_until = -math.inf
        self._buckets: dict[tuple[str, str], Bucket] = {}
        self._running: Counter[str] = Counter()
        self._payments: set[asyncio.Task[None]] = set()

    async def admit(self, grant: Grant, prompt_tokens: int) -> Admitted:
        """Counts a request as running; what is answered has to be closed. Raises LimitReached."""
        tenant, at_once = grant.tenant, grant.max_concurrent
        if at_once is not None and self._running[tenant] >= math.ceil(at_once / self._routers()):
            raise LimitReached("max_concurrent", at_once, 1.0)
        # counted before anything is waited for: others may come meanwhile
        self._running[tenant] += 1
        try:
            await self._draw(tenant, _draws_at_start(grant, prompt_tokens))
        except BaseException:
            self._leave(tenant)
            raise
        return Admitted(self, grant)

    def finish(self, grant: Grant, generated_tokens: int) -> None:
        """Of a request that `admit` counted. Never waits."""
        self._leave(grant.tenant)
        if grant.tokens_per_minute is not None and generated_tokens:
            draw = Draw("tokens_per_minute", grant.tokens_per_minute, IN_ANY_CASE, generated_tokens)
            paying = asyncio.ensure_future(self._draw(grant.tenant, [draw]))
            self._payments.add(paying)
            paying.add_done_callback(self._payments.discard)

    def _leave(self, tenant: str) -> None:
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]

    async def _draw(self, tenant: str, draws: Sequence[Draw]) -> None:
        if not draws:
            return
        answer = await self._ask_redis(tenant, draws)
        wait_s, limiting = self._draw_here(tenant, draws) if answer is None else answer
        if limiting is not None:
            raise LimitReached(limiting.limit, limiting.per_minute, wait_s)

    async def _ask_redis(self, tenant: str, draws: Sequence[Draw]) -> tuple[float, Draw | None] | None:
        """Seconds to wait and for what; None where Redis has no say."""
        if self._script is None or self._clock() < self._rests_until:
            return None
        # in braces: all of a tenant's lie in one slot of a Redis cluster
        keys = [f"{KEY}:{{{tenant}}}:{draw.limit}" for draw in draws]
        numbers = [number for draw in draws for number in (draw.per_minute, draw.needed, draw.amount)]
        try:
            wait, which = await asyncio.wait_for(self._script(keys=keys, args=numbers), ANSWER_S)
        except (RedisError, OSError, TimeoutError) as error:
            log.warning("limits are kept by each router alone for now: %r", error)
            self._rests_until = self._clock() + REST_S
            return None
        return float(wait), draws[which - 1] if which else None

    def _draw_here(self, tenant: str, draws: Sequence[Draw]) -> tuple[float, Draw | None]:
        now, after = self._clock(), {}
        longest, limiting = 0.0, None
        for draw in draws:
            key = (tenant, draw.limit)
            bucket = self._buckets.get(key) or buckets.full(draw.per_minute, now)
            bucket = buckets.filled(bucket, draw.per_minute, now)
            wait = buckets.wait_s(bucket, draw.per_minute, draw.needed)
            if wait > longest:
                longest, limiting = wait, draw
            after[key] = buckets.taken(bucket, draw.amount)
        if limiting is None:
            self._buckets |= after
        return longest, limiting


class Admitted:
    """One running request of a tenant. Closing twice is closing once."""

    def __init__(self, limiter: Limiter, grant: Grant) -> None:
        self._limiter: Limiter | None = limiter
        self._grant = grant

    def close(self, generated_tokens: int) -> None:
        """generated_tokens: of all its sequences together."""
        limiter, self._limiter = self._limiter, None
        if limiter is not None:
            limiter.finish(self._grant, generated_tokens)


def _draws_at_start(grant: Grant, prompt_tokens: int) -> list[Draw]:
    """A request has to be there as a whole, and of tokens anything at all."""
    draws = []
    if grant.requests_per_minute is not None:
        draws.append(Draw("requests_per_minute", grant.requests_per_minute, 1.0, 1.0))
    if grant.tokens_per_minute is not None:
        draws.append(Draw("tokens_per_minute", grant.tokens_per_minute, 1.0, prompt_tokens))
    return draws
