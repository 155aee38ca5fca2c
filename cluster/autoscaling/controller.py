"""Keeps asking how many workers there should be, beside a running scheduler; wakes a fleet that sleeps.

One asyncio task; the replay of the last minutes runs off the event loop. Knows no Ray: how to wake a sleeping
fleet is given to it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from ..scheduling.scheduler import GlobalScheduler
from ..tasks import end
from .autoscaler import Autoscaler
from .config import ScalingConfig
from .watch import Watch

log = logging.getLogger(__name__)

INTERVAL_S = 2.0
WAKE_AGAIN_S = 5.0


class ScalingController:
    """start once, then read `wanted`, then stop.

    wake: returns when a worker serves, or fails. step_target_s: as the workers' batchers have it.
    """

    def __init__(
        self,
        core: GlobalScheduler,
        config: ScalingConfig,
        model: str,
        *,
        step_target_s: float,
        wake: Callable[[], Awaitable[None]],
    ) -> None:
        self.wanted = max(1, config.min_workers)
        self._watch = Watch(core, Autoscaler(config), model, step_target_s)
        self._wake = wake
        self._task: asyncio.Task[None] | None = None
        self._waking: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="autoscaling")

    async def stop(self) -> None:
        """Idempotent."""
        for task in (self._task, self._waking):
            if task is not None:
                await end(task)
        self._task = self._waking = None

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            try:
                await self._decide()
            except Exception:
                # better the same number as before than none
                log.exception("autoscaling: no decision")

    async def _decide(self) -> None:
        now = time.monotonic()
        seen = self._watch.look(now)
        decision = await asyncio.to_thread(self._watch.decide, self.wanted, seen, now)
        if decision.target != self.wanted:
            wanted = decision.wanted
            log.info(
                "workers wanted: %d instead of %d (%s; load × %.2f; %d serve, %d requests open)",
                decision.target,
                self.wanted,
                wanted.reason,
                wanted.growth,
                seen.workers,
                seen.open_requests,
            )
            self.wanted = decision.target
        if seen.open_requests and not seen.workers and (self._waking is None or self._waking.done()):
            self._waking = asyncio.create_task(self._wake_fleet(), name="waking")

    async def _wake_fleet(self) -> None:
        try:
            await self._wake()
        except Exception as error:
            log.warning("no worker could be woken: %r", error)
            await asyncio.sleep(WAKE_AGAIN_S)
