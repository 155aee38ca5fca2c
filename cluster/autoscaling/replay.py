"""What if there were n workers: the requests of the last minutes once more, on a coarse model of workers.

Each request goes to the worker that would start it first. Prefills of a worker come one after the other,
slowed by the decodes beside them as the batcher slows them; decodes share its steps; memory that is full
holds up what comes. Microseconds per request instead of the simulator's step by step; no caches, since
what they supplied is left out of the requests. Pure.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from decodefleet.worker.protocol import StepTime

from .demand import Asked

# prefill never takes all of a worker for good
MOST_BUSY = 0.9
# of a past from which its share can be told
SHORTEST_S = 15.0


class WorkerModel(NamedTuple):
    """kv_tokens: of the pool. step_target_s: to which prefill beside decodes is cut, 0 for never.
    max_running: sequences at once, None for no limit."""

    step: StepTime
    kv_tokens: int
    step_target_s: float
    max_running: int | None = None


class Forecast(NamedTuple):
    """attained: share of requests within both targets. wait_s: mean time until a prefill starts.
    kv_peak: most memory in use on one worker, as a share."""

    attained: float
    wait_s: float
    kv_peak: float


_FREE_AT = attrgetter("free_at")


@dataclass(slots=True)
class _Worker:
    """free_at: when its prefills are done. ends: (when, tokens in memory) of what decodes."""

    free_at: float = float("-inf")
    ends: list[tuple[float, int]] = field(default_factory=list)
    kv_tokens: int = 0
    kv_peak: int = 0

    def settle(self, now: float) -> None:
        while self.ends and self.ends[0][0] <= now:
            self.kv_tokens -= heapq.heappop(self.ends)[1]


def replay(
    asked: Sequence[Asked],
    workers: int,
    model: WorkerModel,
    ttft_s: float,
    itl_s: float,
    *,
    faster: float = 1.0,
    judged_from: float = float("-inf"),
) -> Forecast:
    """faster: how much more often requests come than they did. judged_from: those before only fill the fleet.

    No workers serve nobody.
    """
    if not asked:
        return Forecast(1.0, 0.0, 0.0)
    if not workers:
        return Forecast(0.0, float("inf"), 0.0)
    fleet = [_Worker() for _ in range(workers)]
    busy = _prefill_share(asked, workers, model, faster)
    start, judged, good, waited = asked[0].at, 0, 0, 0.0
    for one in asked:
        now = start + (one.at - start) / faster
        # a queue that so few would have had is not one that is there
        if one.at >= judged_from and not judged:
            for worker in fleet:
                worker.free_at = min(worker.free_at, now)
        chosen = _first_free(fleet, now)
        wait, ttft, itl = _serve(chosen, one, now, busy, model)
        if one.at >= judged_from:
            judged += 1
            waited += wait
            good += ttft <= ttft_s and itl <= itl_s
    peak = max(worker.kv_peak for worker in fleet)
    return Forecast(good / max(1, judged), waited / max(1, judged), peak / model.kv_tokens)


def attainable(asked: Sequence[Asked], model: WorkerModel, ttft_s: float, itl_s: float) -> float:
    """Share of requests that would be served within both targets beside one other and behind nobody."""
    step = model.step
    beside = _slowed(step.seconds(0, 0, 1), model)
    kept = [
        (step.base + one.prefill_tokens * step.prefill_token) * beside <= ttft_s
        and step.seconds(0, one.context, 1) <= itl_s
        for one in asked
    ]
    return sum(kept) / len(kept) if kept else 1.0


def _first_free(fleet: Sequence[_Worker], now: float) -> _Worker:
    """Of those whose prefills are done, the one that decodes least; else the one that is done first."""
    free = [worker for worker in fleet if worker.free_at <= now]
    return min(free, key=_decoding) if free else min(fleet, key=_FREE_AT)


def _decoding(worker: _Worker) -> int:
    return len(worker.ends)


def _slowed(decode_s: float, model: WorkerModel) -> float:
    """How much longer prefill takes beside decodes: a step with both lasts as long as the target, or twice
    the decodes."""
    if not model.step_target_s:
        return 1.0
    return max(model.step_target_s, 2 * decode_s) / max(model.step_target_s - decode_s, decode_s)


def _serve(
    worker: _Worker, one: Asked, now: float, busy: float, model: WorkerModel
) -> tuple[float, float, float]:
    """(seconds until it starts, until its first token, per further token)."""
    start = max(now, worker.free_at)
    worker.settle(start)
    limit = model.max_running
    while worker.ends and (
        worker.kv_tokens + one.context > model.kv_tokens or (limit is not None and len(worker.ends) >= limit)
    ):
        start = max(start, worker.ends[0][0])
        worker.settle(start)
    prefill = model.step.base + one.prefill_tokens * model.step.prefill_token
    if worker.ends:
        prefill *= _slowed(model.step.seconds(0, worker.kv_tokens, len(worker.ends)), model)
    first = worker.free_at = start + prefill
    itl = model.step.seconds(0, worker.kv_tokens + one.context, len(worker.ends) + 1) / (1 - busy)
    heapq.heappush(worker.ends, (first + one.output_tokens * itl, one.context))
    worker.kv_tokens += one.context
    worker.kv_peak = max(worker.kv_peak, worker.kv_tokens)
    return start - now, first - now, itl


def _prefill_share(asked: Sequence[Asked], workers: int, model: WorkerModel, faster: float) -> float:
    """Of a worker's time, what prefill takes on average."""
    span = max((asked[-1].at - asked[0].at) / faster, SHORTEST_S)
    seconds = sum(one.prefill_tokens for one in asked) * model.step.prefill_token
    return min(MOST_BUSY, seconds / span / workers)
