"""Remembers what the policy needs to be steady: requests, what was wanted of late, how long starts take.

More workers are asked for at once; fewer only when fewer, with some load to spare, would have been enough for
long, or less long the surer it is that the load falls; not while some are still to come, and not soon after
a rise was taken back before.
Synchronous, time passed in; knows no Ray.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from .config import ScalingConfig
from .demand import Asked, Demand, trend
from .policy import Snapshot, Wanted, wanted_workers
from .replay import WorkerModel

# so much more load than is expected must fewer workers be able to bear before one is let go
SPARE = 1.05
# starts; what has not come by then does not keep others from going
PATIENCE = 5.0
# holds from one let-go that follows a rise to the next: noise takes fewer turns than two in so long
TURNS_APART = 2.5
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
        self._short_since: float | None = None
        self._began: float | None = None
        # whether the last change was for more; when one for fewer last followed such a one
        self._rose, self._turned_at = False, float("-inf")
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
        if workers >= target:
            self._short_since = None
        elif self._short_since is None:
            self._short_since = now
        config = self.config
        asked = self.demand.since(now - 2 * config.window_s)
        last = self.demand.last_at
        going = trend(self.demand.work(self._began, now), config.window_s, self.startup_s)
        snapshot = Snapshot(
            now=now,
            workers=workers,
            open_requests=open_requests,
            backlog_s=backlog_s,
            model=model,
            quiet_s=now - (self._began if last is None else last),
            growth=going.growth,
        )
        wanted = wanted_workers(snapshot, asked, config)
        lean = wanted.workers
        if wanted.workers < target and wanted.reason != "idle":
            lean = wanted_workers(snapshot, asked, config, spare=SPARE).workers
        self._remember(now, max(lean, wanted.workers))
        if wanted.workers > target:
            self._rose = True
            self._ordered_at = now if self._ordered_at is None else self._ordered_at
            return Decision(wanted.workers, wanted)
        # where nobody has asked for `idle_s`, that was hold enough
        hold_s = config.hold_s * (1 - going.falls) if wanted.workers else 0.0
        enough = max(workers for at, workers in self._lean if at >= now - hold_s)
        if enough >= target:
            return Decision(config.bounded(target), wanted)
        held = self._held(now, target, workers, hold_s)
        if held is None and self._rose:
            self._rose, self._turned_at = False, now
        return Decision(target if held else config.bounded(enough), wanted, held)

    def _held(self, now: float, target: int, workers: int, hold_s: float) -> str | None:
        assert self._began is not None
        if self._awaits(now, target, workers):
            return "pending"
        if now - self._began < self.config.hold_s:
            return "young"
        if self._rose and now - self._turned_at < TURNS_APART * hold_s:
            return "turned"
        return None

    def _awaits(self, now: float, target: int, workers: int) -> bool:
        if workers >= target:
            return False
        return self._short_since is None or now - self._short_since < PATIENCE * self.startup_s

    def _remember(self, now: float, workers: int) -> None:
        self._lean.append((now, workers))
        while self._lean[0][0] < now - self.config.hold_s:
            self._lean.popleft()

    def _learn_start(self, now: float, target: int, workers: int) -> None:
        if self._ordered_at is not None and workers >= target:
            took = now - self._ordered_at
            self.startup_s += (took - self.startup_s) * _GAIN
            self._ordered_at = None
