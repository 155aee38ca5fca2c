"""Remembers what the policy needs to be steady: requests, what was wanted of late, how long starts take.

More workers are asked for at once; fewer only when fewer, with some load to spare, would have been enough all
the while, and never while some are still to come. Synchronous, time passed in; knows no Ray.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from .config import ScalingConfig
from .demand import Asked, Demand
from .policy import Snapshot, Wanted, wanted_workers
from .replay import WorkerModel

# so much more load than is expected must fewer workers be able to bear before one is let go
SPARE = 1.05
# of a new measurement of how long a start takes
_GAIN = 0.5


class Decision(NamedTuple):
    """target: workers to have. wanted: what the load takes at this moment. held: why fewer are not let go."""

    target: int
    wanted: Wanted
    held: str | None = None


class Autoscaler:
    """asked for each request as it is placed; `decide` every few seconds."""

    def __init__(self, config: ScalingConfig) -> None:
        self.config = config
        self.demand = Demand(2 * config.window_s)
        self.startup_s = config.startup_s
        self._lean: deque[tuple[float, int]] = deque()
        self._began: float | None = None
        self._ordered_at: float | None = None

    def asked(self, request: Asked) -> None:
        self.demand.add(request)

    def decide(
        self,
        now: float,
        *,
        target: int,
        workers: int,
        open_requests: int,
        backlog_s: float,
        model: WorkerModel | None,
    ) -> Decision:
        """target: workers asked for before, of which `workers` serve."""
        self._began = now if self._began is None else self._began
        self._learn_start(now, target, workers)
        config = self.config
        asked = self.demand.since(now - 2 * config.window_s)
        last = self.demand.last_at
        snapshot = Snapshot(
            now=now,
            workers=workers,
            open_requests=open_requests,
            backlog_s=backlog_s,
            startup_s=self.startup_s,
            model=model,
            quiet_s=now - (self._began if last is None else last),
            grown=now - self._began >= config.window_s,
        )
        wanted = wanted_workers(snapshot, asked, config)
        lean = wanted.workers
        if wanted.workers < target and wanted.reason != "idle":
            lean = wanted_workers(snapshot, asked, config, spare=SPARE).workers
        self._remember(now, max(lean, wanted.workers))
        if wanted.workers > target:
            self._ordered_at = now if self._ordered_at is None else self._ordered_at
            return Decision(wanted.workers, wanted)
        enough = max(workers for _, workers in self._lean)
        if enough >= target:
            return Decision(config.bounded(target), wanted)
        if workers < target:
            return Decision(target, wanted, "pending")
        if now - self._began < config.hold_s:
            return Decision(target, wanted, "young")
        return Decision(config.bounded(enough), wanted)

    def _remember(self, now: float, workers: int) -> None:
        self._lean.append((now, workers))
        while self._lean[0][0] < now - self.config.hold_s:
            self._lean.popleft()

    def _learn_start(self, now: float, target: int, workers: int) -> None:
        if self._ordered_at is not None and workers >= target:
            took = now - self._ordered_at
            self.startup_s += (took - self.startup_s) * _GAIN
            self._ordered_at = None
