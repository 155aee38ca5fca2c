"""How many workers there should be. Pure: (snapshot, requests of late, objectives) -> Wanted, with reasons.

Enough is what keeps the objectives when the requests of the last minutes come once more (`replay`), as much
more often as they will have grown by the time that a new worker serves, and what waits already is worked off
soon. What was wanted before is the caller's to remember (`Autoscaler`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from .config import ScalingConfig
from .demand import Asked
from .replay import Forecast, WorkerModel, attainable, replay

Reason = Literal["objectives", "memory", "backlog", "idle", "first", "unknown"]

# what waits beyond the objective is to be worked off in so many seconds
CATCH_UP_S = 30.0
# a worker is asked for if it brings so much of attainment, or cuts waits to such a share
WORTH, LESS_WAIT = 1e-3, 0.9
# mean wait, of the objective, above which waits count
OVERLOADED = 0.25


class Snapshot(NamedTuple):
    """workers: that serve. open_requests: waiting or running. backlog_s: prefill that waits, summed over
    workers. model: of a worker; None until one has reported. quiet_s: since the last request. growth: of the
    load, until a new worker serves."""

    now: float
    workers: int
    open_requests: int
    backlog_s: float
    model: WorkerModel | None
    quiet_s: float = 0.0
    growth: float = 1.0


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
    faster = spare * (1 + config.headroom) * now.growth
    workers, forecast = fewest_workers(
        asked, now.workers, now.model, config, judged_from=now.now - config.window_s, faster=faster
    )
    reason: Reason = "memory" if forecast.kv_peak > config.kv_share else "objectives"
    late = now.backlog_s - now.workers * config.ttft_target_s
    if late > CATCH_UP_S / 2:
        workers, reason = workers + round(late / CATCH_UP_S), "backlog"
    return Wanted(config.bounded(workers), reason, faster, forecast)


def fewest_workers(
    asked: Sequence[Asked],
    near: int,
    model: WorkerModel,
    config: ScalingConfig,
    *,
    judged_from: float,
    faster: float = 1.0,
) -> tuple[int, Forecast]:
    """The fewest workers that keep the objectives, 1 to `max_workers`, searched from `near`.

    judged_from: requests from before only fill the fleet. Where no number keeps them, the number from which
    on further ones bring too little.
    """
    targets = (config.ttft_target_s, config.itl_target_s)
    # prompts that are too long for the objective are so with any number of workers
    judged = [one for one in asked if one.at >= judged_from]
    goal = config.attainment * attainable(judged, model, *targets)

    def look(workers: int) -> Forecast:
        return replay(asked, workers, model, *targets, faster=faster, judged_from=judged_from)

    def keeps(forecast: Forecast) -> bool:
        return forecast.attained >= goal and forecast.kv_peak <= config.kv_share

    workers = max(1, min(near, config.max_workers))
    forecast = look(workers)
    if keeps(forecast):
        while workers > 1 and keeps(fewer := look(workers - 1)):
            workers, forecast = workers - 1, fewer
        return workers, forecast
    best = workers, forecast
    # where twice as many are no better, it is not for want of workers
    while workers < min(config.max_workers, 2 * best[0] + 1) and not keeps(forecast):
        workers += 1
        forecast = look(workers)
        if _worth(workers - best[0], forecast, best[1], config.ttft_target_s):
            best = workers, forecast
    return best


def _worth(added: int, one: Forecast, other: Forecast, ttft_s: float) -> bool:
    """Whether `added` workers change enough. An overloaded fleet keeps nobody's objective, however close it
    comes; there waits tell."""
    overloaded = other.wait_s > OVERLOADED * ttft_s
    return one.attained >= other.attained + WORTH * added or (
        overloaded and one.wait_s < LESS_WAIT * other.wait_s
    )
