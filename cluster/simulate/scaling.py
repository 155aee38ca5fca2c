"""Simulated fleets that grow and shrink: who decides how many workers there are, and what that costs.

A worker serves some time after it was ordered and costs from then on; one that is let go ends what it has.
Beside our autoscaler: Serve's default, a rule on waiting requests as KEDA has it, and a planner that knows
what will come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import ceil
from typing import NamedTuple, Protocol

from ..autoscaling.autoscaler import Autoscaler
from ..autoscaling.config import ScalingConfig
from ..autoscaling.demand import Asked
from ..autoscaling.policy import fewest_workers
from ..autoscaling.replay import WorkerModel
from ..autoscaling.watch import Observed, Watch, observe
from .arrivals import Arrival
from .fleet import MODEL, Member
from .simulation import Simulation


class Scaler(Protocol):
    @property
    def name(self) -> str: ...

    def target(self, simulation: Simulation, seen: Observed, target: int) -> int:
        """Workers to have from now on; `target` is what was decided before."""
        ...


class Point(NamedTuple):
    """One decision: workers asked for, and those that serve."""

    at: float
    target: int
    workers: int
    open_requests: int


class ScaledFleet:
    """Applies a scaler to a simulation that has not begun; `startup_s` as long as a worker takes to serve."""

    def __init__(
        self,
        simulation: Simulation,
        scaler: Scaler,
        *,
        first: int,
        startup_s: float,
        interval_s: float = 5.0,
        step_target_s: float = 0.075,
    ) -> None:
        self.timeline: list[Point] = []
        self._simulation, self._scaler = simulation, scaler
        self._startup_s, self._step_target_s = startup_s, step_target_s
        self._target = first
        self._ordered: list[float] = []
        for _ in range(first):
            simulation.add_worker()
        simulation.events.every(interval_s, interval_s, self._decide)

    def _decide(self) -> bool:
        simulation = self._simulation
        now = simulation.events.now
        seen = observe(simulation.scheduler, MODEL, self._step_target_s, now)
        self._target = self._scaler.target(simulation, seen, self._target)
        self.timeline.append(Point(now, self._target, seen.workers, seen.open_requests))
        staying = [member for member in simulation.members.values() if not member.draining]
        excess = len(staying) + len(self._ordered) - self._target
        for _ in range(-excess):
            self._order(now)
        for _ in range(min(excess, len(self._ordered))):
            # what has not come yet is sent back first
            self._cancel(now)
            excess -= 1
        for member in sorted(staying, key=_load)[: max(0, excess)]:
            simulation.retire(member.key.worker_id)
        return not simulation.done

    def _order(self, now: float) -> None:
        self._ordered.append(now)
        self._simulation.events.at(now + self._startup_s, lambda: self._arrive(now))

    def _cancel(self, now: float) -> None:
        self._simulation.wasted_s += now - self._ordered.pop()

    def _arrive(self, ordered_at: float) -> None:
        if ordered_at in self._ordered:
            self._ordered.remove(ordered_at)
            self._simulation.add_worker(ordered_at)


def _load(member: Member) -> int:
    return member.worker.sequences


class Ours:
    """The autoscaler, fed as in life."""

    name = "ours"

    def __init__(self, simulation: Simulation, config: ScalingConfig, step_target_s: float = 0.075) -> None:
        self._watch = Watch(simulation.scheduler, Autoscaler(config), MODEL, step_target_s)

    def target(self, simulation: Simulation, seen: Observed, target: int) -> int:
        now = simulation.events.now
        return self._watch.decide(target, self._watch.look(now), now).target


class ServeDefault:
    """Ray Serve's default policy: open requests over `target_ongoing` per replica, averaged over 30 s; up
    when that has held for 30 s, down after 600 s (AutoscalingConfig's defaults)."""

    def __init__(self, config: ScalingConfig, target_ongoing: float = 2.0) -> None:
        self.name = f"Serve, {target_ongoing:g} ongoing"
        self._config, self._ongoing = config, target_ongoing
        self._seen: deque[tuple[float, int]] = deque()
        self._since: tuple[int, float] = (0, 0.0)

    def target(self, simulation: Simulation, seen: Observed, target: int) -> int:
        now = simulation.events.now
        self._seen.append((now, seen.open_requests))
        while self._seen[0][0] < now - 30.0:
            self._seen.popleft()
        mean = sum(requests for _, requests in self._seen) / len(self._seen)
        desired = self._config.bounded(ceil(mean / self._ongoing))
        direction = (desired > target) - (desired < target)
        if direction != self._since[0]:
            self._since = direction, now
        delay = 30.0 if direction > 0 else 600.0
        if direction and now - self._since[1] >= delay:
            self._since = 0, now
            return desired
        return target


class WaitingRule:
    """KEDA on waiting requests as production-stack sets it up: one replica per 5 that wait, looked at every
    15 s; up at once, down to the most wanted in the last 300 s (the HPA's stabilisation)."""

    name = "waiting > 5"

    def __init__(self, config: ScalingConfig) -> None:
        self._config = config
        self._wanted: deque[tuple[float, int]] = deque()
        self._looked = float("-inf")

    def target(self, simulation: Simulation, seen: Observed, target: int) -> int:
        now = simulation.events.now
        if now - self._looked < 15.0:
            return target
        self._looked = now
        desired = self._config.bounded(ceil(seen.waiting / 5))
        self._wanted.append((now, desired))
        while self._wanted[0][0] < now - 300.0:
            self._wanted.popleft()
        return max(workers for _, workers in self._wanted) if desired < target else desired


class Fixed:
    """The same number all the while."""

    def __init__(self, workers: int) -> None:
        self.name = f"always {workers}"
        self._workers = workers

    def target(self, simulation: Simulation, seen: Observed, target: int) -> int:
        return self._workers


class Planner:
    """Knows what will come: at each moment as many workers as that takes, ordered in time.

    For each bucket of time the fewest that keep the objectives (`replay` of what really comes in it).
    """

    name = "planner"

    def __init__(
        self,
        arrivals: Sequence[Arrival],
        model: WorkerModel,
        config: ScalingConfig,
        startup_s: float,
        bucket_s: float = 30.0,
    ) -> None:
        self._startup_s, self._bucket_s = startup_s, bucket_s
        asked = [
            Asked(one.at, one.prompt_tokens, one.prompt_tokens + one.output_tokens // 2, one.output_tokens)
            for one in arrivals
        ]
        buckets = int(arrivals[-1].at // bucket_s) + 1
        self.needs: list[int] = []
        for number in range(buckets):
            start = number * bucket_s
            window = [one for one in asked if start - bucket_s <= one.at < start + bucket_s]
            near = self.needs[-1] if self.needs else config.bounded(1)
            self.needs.append(fewest_workers(window, near, model, config, judged_from=start)[0])

    @property
    def first(self) -> int:
        """Workers to begin with: what the first two minutes take."""
        return max(self.needs[: ceil(120.0 / self._bucket_s)])

    def target(self, simulation: Simulation, seen: Observed, target: int) -> int:
        now = simulation.events.now
        first, last = (int(moment // self._bucket_s) for moment in (now, now + self._startup_s + 5.0))
        return max(self.needs[first : last + 1], default=self.needs[-1])
