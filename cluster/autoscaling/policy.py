"""How many workers there should be. Pure: (snapshot, requests of late, objectives) -> Wanted, with reasons.

Enough is what keeps the objectives when the requests of the last minutes come once more (`replay`), as much
more often as they will have grown by the time that a new worker serves, and what waits already is worked off
soon. What was wanted before is the caller's to remember (`Autoscaler`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from .config import ScalingConfig
from .demand import Asked, growth
from .replay import Forecast, WorkerModel, attainable, replay

Reason = Literal["objectives", "memory", "backlog", "idle", "first", "unknown"]

# what waits beyond the objective is to be worked off in so many seconds
CATCH_UP_S = 30.0
# of attainment, and share of waits: more workers that change less are not asked for
NO_DIFFERENCE, LESS_WAIT = 1e-3, 0.9


class Snapshot(NamedTuple):
    """workers: that serve. open_requests: waiting or running. backlog_s: prefill that waits, summed over
    workers. startup_s: from asking for a worker until it serves. model: of a worker; None until one has
    reported. quiet_s: since the last request. grown: whether the past is long enough to tell of growth."""

    now: float
    workers: int
    open_requests: int
    backlog_s: float
    startup_s: float
    model: WorkerModel | None
    quiet_s: float = 0.0
    grown: bool = True


class Wanted(NamedTuple):
    """workers: within the bounds. reason: what it takes that many for. growth: that was reckoned with."""

    workers: int
    reason: Reason
    growth: float = 1.0
    forecast: Forecast | None = None


def wanted_workers(
    now: Snapshot, asked: Sequence[Asked], config: ScalingConfig, *, spare: float = 1.0
) -> Wanted:
    """For the load as it is; hysteresis is not its business.

    asked: of twice `window_s`: the older half fills the fleet that the newer one meets. spare: so much more
    load than is expected.
    """
    recent = [one for one in asked if one.at >= now.now - config.window_s]
    if not recent and not now.open_requests:
        left = 0 if now.quiet_s >= config.idle_s else min(1, now.workers)
        return Wanted(config.bounded(left), "idle")
    if not now.workers:
        return Wanted(config.bounded(1), "first")
    if now.model is None or not recent:
        return Wanted(config.bounded(now.workers), "unknown")
    grows = growth(recent, now.now, now.startup_s) if now.grown else 1.0
    faster = spare * max(1 + config.headroom, grows)
    workers, forecast = _enough(asked, now, config, faster)
    reason: Reason = "memory" if forecast.kv_peak > config.kv_share else "objectives"
    late = now.backlog_s - now.workers * config.ttft_target_s
    if late > CATCH_UP_S / 2:
        workers, reason = workers + round(late / CATCH_UP_S), "backlog"
    return Wanted(config.bounded(workers), reason, faster, forecast)


def _enough(
    asked: Sequence[Asked], now: Snapshot, config: ScalingConfig, faster: float
) -> tuple[int, Forecast]:
    """The fewest workers that keep the objectives, `max_workers` at most, searched from those there are."""
    model, targets = now.model, (config.ttft_target_s, config.itl_target_s)
    assert model is not None
    since = now.now - config.window_s
    # prompts that are too long for the objective are so with any number of workers
    goal = config.attainment * attainable([one for one in asked if one.at >= since], model, *targets)

    def look(workers: int) -> Forecast:
        return replay(asked, workers, model, *targets, faster=faster, judged_from=since)

    def keeps(forecast: Forecast) -> bool:
        return forecast.attained >= goal and forecast.kv_peak <= config.kv_share

    workers = min(now.workers, config.max_workers)
    forecast = look(workers)
    if keeps(forecast):
        while workers > 1 and keeps(fewer := look(workers - 1)):
            workers, forecast = workers - 1, fewer
        return workers, forecast
    best = workers, forecast
    while workers < config.max_workers and not keeps(forecast):
        workers += 1
        forecast = look(workers)
        if keeps(forecast) or _better(forecast, best[1]):
            best = workers, forecast
    return best


def _better(one: Forecast, other: Forecast) -> bool:
    # an overloaded fleet keeps nobody's objective, however close it comes
    return one.attained > other.attained + NO_DIFFERENCE or one.wait_s < LESS_WAIT * other.wait_s
