"""The fleet's /metrics: what routers and workers count, summed, and the scheduler's own numbers.

Counters never go back when a router or worker dies: what it contributed last stays in the sum. Metric names
are API: those of workers stand in `observability.worker_metrics`, the rest below.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from decodefleet.worker.protocol import WorkerStats

from ..observability.exposition import Exposition, parse
from ..observability.worker_metrics import (
    WAITING_ALIAS,
    count_worker,
    gauge_worker,
    record_usage,
    used_blocks,
)
from .scheduler import GlobalScheduler
from .view import WorkerKey

log = logging.getLogger(__name__)

# the dead beyond these are folded into one sum
_DEAD_KEPT = 8

WORKERS = ("decodefleet_workers", "Workers registered, by state.")
ROUTERS = ("decodefleet_routers", "Routers connected.")
QUEUE_LENGTH = ("decodefleet_scheduler_queue_length", "Requests that wait for a worker.")
RESERVATIONS = ("decodefleet_scheduler_reservations", "Placed requests not released yet.")
PLACEMENTS = ("decodefleet_scheduler_placements_total", "Requests placed on a worker.")
REFUSALS = ("decodefleet_scheduler_refusals_total", "Requests refused, by reason.")
INDEX_BLOCKS = ("decodefleet_scheduler_prefix_index_blocks", "Block hashes in the local prefix index.")
DIRECTORY_UP = ("decodefleet_scheduler_directory_up", "1 while the prefix directory can be read.")
DIRECTORY_LAG = ("decodefleet_scheduler_directory_lag_seconds", "Age of directory news when applied.")
MALFORMED = ("decodefleet_scheduler_malformed_frames_total", "Frames that made no sense.")
UNREACHABLE = (
    "decodefleet_scheduler_unreachable_total",
    "Messages dropped because the peer was gone or full.",
)


class OwnCounters(NamedTuple):
    """What the server around the core knows."""

    malformed: int
    unreachable: dict[str, int]
    directory_up: bool
    directory_lag_s: float | None


@dataclass(frozen=True)
class Sample:
    """Everything one scrape needs, taken at one moment; `render` may run in another thread."""

    routers: tuple[tuple[str, bool], ...]
    base: Exposition
    rest: Exposition

    def render(self) -> str:
        total = Exposition()
        total.add(self.rest)
        total.add(self.base)
        for text, live in self.routers:
            report = _parsed(text)
            if report is not None:
                total.add(report, counters_only=not live)
        return total.render()


class FleetMetrics:
    """Remembers the last report of every router and every incarnation of a worker."""

    def __init__(self) -> None:
        self._routers: dict[str, str] = {}
        self._workers: dict[WorkerKey, tuple[str, WorkerStats]] = {}
        self._base = Exposition()

    def router_report(self, router_id: str, text: str) -> None:
        self._routers[router_id] = text

    def worker_report(self, key: WorkerKey, model: str, stats: WorkerStats) -> None:
        self._workers[key] = (model, stats)

    def sample(self, core: GlobalScheduler, own: OwnCounters) -> Sample:
        """Call it on the event loop."""
        live_routers, live_workers = frozenset(core.routers), core.fleet.keys()
        self._fold(live_routers, live_workers)
        rest = Exposition()
        for model, stats in self._workers.values():
            count_worker(rest, model, stats)
        _gauge_fleet(rest, core)
        _own(rest, core, own)
        base = Exposition()
        base.add(self._base)
        routers = tuple((text, router in live_routers) for router, text in self._routers.items())
        return Sample(routers, base, rest)

    def _fold(self, live_routers: frozenset[str], live_workers: set[WorkerKey]) -> None:
        """Add the longest dead to the base sum, so that memory stays bounded."""
        dead_routers = [router for router in self._routers if router not in live_routers]
        for router in dead_routers[:-_DEAD_KEPT]:
            report = _parsed(self._routers.pop(router))
            if report is not None:
                self._base.add(report, counters_only=True)
        dead_workers = [key for key in self._workers if key not in live_workers]
        for key in dead_workers[:-_DEAD_KEPT]:
            count_worker(self._base, *self._workers.pop(key))


def _parsed(text: str) -> Exposition | None:
    try:
        return parse(text)
    except ValueError as error:
        log.warning("a router's metrics cannot be read: %s", error)
        return None


def _gauge_fleet(out: Exposition, core: GlobalScheduler) -> None:
    used: dict[str, int] = {}
    total: dict[str, int] = {}
    for member in core.fleet:
        model, stats = member.card.name, member.stats
        gauge_worker(out, model, stats)
        out.record(WAITING_ALIAS, "gauge", QUEUE_LENGTH[1], stats.waiting, {"model_name": model})
        used[model] = used.get(model, 0) + used_blocks(stats)
        total[model] = total.get(model, 0) + stats.total_blocks
    for waiter in core.queue:
        out.record(
            WAITING_ALIAS, "gauge", QUEUE_LENGTH[1], waiter.demand.n, {"model_name": waiter.demand.model}
        )
    for model in total:
        record_usage(out, model, used[model], total[model])


def _own(out: Exposition, core: GlobalScheduler, own: OwnCounters) -> None:
    draining = sum(member.stats.draining for member in core.fleet)
    gauges: tuple[tuple[tuple[str, str], float, Mapping[str, str] | None], ...] = (
        (WORKERS, len(core.fleet) - draining, {"state": "serving"}),
        (WORKERS, draining, {"state": "draining"}),
        (ROUTERS, len(core.routers), None),
        (QUEUE_LENGTH, len(core.queue), None),
        (RESERVATIONS, len(core.ledger), None),
        (INDEX_BLOCKS, len(core.index), None),
        (DIRECTORY_UP, int(own.directory_up), None),
    )
    for (name, documentation), value, labels in gauges:
        out.record(name, "gauge", documentation, value, labels)
    if own.directory_lag_s is not None:
        out.record(DIRECTORY_LAG[0], "gauge", DIRECTORY_LAG[1], own.directory_lag_s)
    out.record(PLACEMENTS[0], "counter", PLACEMENTS[1], core.placements)
    for refusal, count in core.refused.items():
        out.record(REFUSALS[0], "counter", REFUSALS[1], count, {"reason": refusal})
    out.record(MALFORMED[0], "counter", MALFORMED[1], own.malformed)
    for reason, count in own.unreachable.items():
        out.record(UNREACHABLE[0], "counter", UNREACHABLE[1], count, {"reason": reason})
