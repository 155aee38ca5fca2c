"""The fleet's recent past: a point every few seconds, for people to look at. In memory, and bounded.

Made from differences of what workers and routers count, each life of each for itself, so that no restart
shows as a jump. Latencies are of what came in over the last half minute.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Literal, NamedTuple

import msgspec

from decodefleet.worker.protocol import RouterCounts, WorkerStats

from ..observability.distribution import quantile
from ..observability.router_metrics import ITL_BOUNDS_S, TTFT_BOUNDS_S
from ..observability.worker_metrics import used_blocks
from .view import WorkerKey

STEP_S = 5.0
POINTS = 360
CHANGES = 50
# points whose latencies are taken together: a few requests make no percentile
WINDOW = 6
QUANTILES = (0.5, 0.95, 0.99)


class Point(msgspec.Struct, frozen=True):
    """at: Unix time. Rates are per second since the point before. hit_rate: share of prompt tokens found in a
    cache; ttft_s, itl_s: p50, p95 and p99; None where there was nothing to measure.
    """

    at: float
    workers: int
    running: int
    waiting: int
    queued: int
    kv_usage: float
    requests: float
    failures: float
    prompt_tokens: float
    generated_tokens: float
    hit_rate: float | None
    ttft_s: tuple[float, ...] | None
    itl_s: tuple[float, ...] | None


class Change(msgspec.Struct, frozen=True):
    """What became of a worker, seen at `at` (Unix time). left: it had drained before; lost: it had not."""

    at: float
    worker_id: str
    what: Literal["came", "restarted", "left", "lost"]


class Now(NamedTuple):
    """workers: last report of each living one. queued: requests that wait in the scheduler."""

    workers: Mapping[WorkerKey, WorkerStats]
    routers: Mapping[str, RouterCounts]
    queued: int


class History:
    """`due` and `note` many times a second, `drains` between; `since` and `changes` for who asks."""

    def __init__(self) -> None:
        self._points: deque[Point] = deque(maxlen=POINTS)
        self._changes: deque[Change] = deque(maxlen=CHANGES)
        self._draining: set[WorkerKey] = set()
        self._before: Now | None = None
        self._noted = float("-inf")
        self._ttft: deque[tuple[int, ...]] = deque(maxlen=WINDOW)
        self._itl: deque[tuple[int, ...]] = deque(maxlen=WINDOW)

    def due(self, now: float) -> bool:
        return now - self._noted >= STEP_S

    def drains(self, worker: WorkerKey) -> None:
        """When it is gone, it was not lost. An idle one drains in less time than lies between two points."""
        self._draining.add(worker)

    def note(self, now: float, at: float, news: Now) -> None:
        """now: monotonic. at: Unix time. The first call only remembers."""
        before, seconds = self._before, now - self._noted
        self._before, self._noted = news, now
        if before is None:
            return
        self._changes.extend(_changes(at, before.workers, news.workers, self._draining))
        self._draining &= news.workers.keys()
        workers = _worker_growth(before.workers, news.workers)
        routers = _growth(before.routers, news.routers)
        self._ttft.append(_summed([grown.ttft for grown in routers]))
        self._itl.append(_summed([grown.itl for grown in routers]))
        queried = workers["prefix_query_tokens"]
        total = sum(stats.total_blocks for stats in news.workers.values())
        used = sum(used_blocks(stats) for stats in news.workers.values())
        self._points.append(
            Point(
                at=at,
                workers=len(news.workers),
                running=sum(stats.running for stats in news.workers.values()),
                waiting=sum(stats.waiting for stats in news.workers.values()),
                queued=news.queued,
                kv_usage=used / total if total else 0.0,
                requests=sum(grown.requests for grown in routers) / seconds,
                failures=sum(grown.failures for grown in routers) / seconds,
                prompt_tokens=workers["prompt_tokens"] / seconds,
                generated_tokens=workers["generated_tokens"] / seconds,
                hit_rate=workers["prefix_hit_tokens"] / queried if queried else None,
                ttft_s=_quantiles(TTFT_BOUNDS_S, _summed(self._ttft)),
                itl_s=_quantiles(ITL_BOUNDS_S, _summed(self._itl)),
            )
        )

    def since(self, at: float) -> list[Point]:
        return [point for point in self._points if point.at > at]

    def changes(self, at: float) -> list[Change]:
        """After this Unix time, oldest first."""
        return [change for change in self._changes if change.at > at]


def _changes(
    at: float, before: Collection[WorkerKey], now: Collection[WorkerKey], draining: Collection[WorkerKey]
) -> Iterator[Change]:
    known, present = ({key.worker_id for key in workers} for workers in (before, now))
    for key in before:
        if key.worker_id not in present:
            yield Change(at, key.worker_id, "left" if key in draining else "lost")
    for key in now:
        if key not in before:
            yield Change(at, key.worker_id, "restarted" if key.worker_id in known else "came")


def _worker_growth(
    before: Mapping[WorkerKey, WorkerStats], now: Mapping[WorkerKey, WorkerStats]
) -> dict[str, int]:
    names = ("prompt_tokens", "generated_tokens", "prefix_query_tokens", "prefix_hit_tokens")
    # of who is seen for the first time nobody can say since when it counts
    both = [(before[key], stats) for key, stats in now.items() if key in before]
    return {name: sum(max(0, getattr(new, name) - getattr(old, name)) for old, new in both) for name in names}


def _growth(before: Mapping[str, RouterCounts], now: Mapping[str, RouterCounts]) -> list[RouterCounts]:
    return [
        RouterCounts(
            requests=max(0, counts.requests - before[router_id].requests),
            failures=max(0, counts.failures - before[router_id].failures),
            ttft=_less(counts.ttft, before[router_id].ttft),
            itl=_less(counts.itl, before[router_id].itl),
        )
        for router_id, counts in now.items()
        if router_id in before
    ]


def _less(counts: Sequence[int], then: Sequence[int]) -> tuple[int, ...]:
    return tuple(max(0, new - old) for new, old in zip_longest(counts, then, fillvalue=0))


def _summed(many: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(map(sum, zip_longest(*many, fillvalue=0)))


def _quantiles(bounds: Sequence[float], counts: Sequence[int]) -> tuple[float, ...] | None:
    # a router of another version may count in other buckets
    if len(counts) != len(bounds) + 1:
        return None
    found = [quantile(bounds, counts, q) for q in QUANTILES]
    return None if None in found else tuple(value for value in found if value is not None)
