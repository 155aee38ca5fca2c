"""The fleet's /metrics: what routers and workers count, summed, and the scheduler's own numbers.

Counters never go back when a router or worker dies: what it contributed last stays in the sum. Metric names
are API; they are all in the tables below, vLLM's names beside ours where the meaning is the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from decodefleet.worker.protocol import WorkerStats

from .exposition import Exposition, parse
from .scheduler import GlobalScheduler
from .tier_metrics import count_tiers, gauge_tiers
from .view import WorkerKey

log = logging.getLogger(__name__)

# the dead beyond these are folded into one sum
_DEAD_KEPT = 8


class Metric(NamedTuple):
    """alias: vLLM's name of the same thing."""

    name: str
    documentation: str
    value: Callable[[WorkerStats], float]
    alias: str | None = None


WORKER_COUNTERS = (
    Metric(
        "decodefleet_prompt_tokens_total",
        "Prompt tokens taken in.",
        lambda stats: stats.prompt_tokens,
        "vllm:prompt_tokens_total",
    ),
    Metric(
        "decodefleet_generation_tokens_total",
        "Tokens generated.",
        lambda stats: stats.generated_tokens,
        "vllm:generation_tokens_total",
    ),
    Metric(
        "decodefleet_prefix_cache_queries_total",
        "Prompt tokens looked up in the prefix cache.",
        lambda stats: stats.prefix_query_tokens,
        "vllm:prefix_cache_queries_total",
    ),
    Metric(
        "decodefleet_prefix_cache_hits_total",
        "Prompt tokens found in the prefix cache.",
        lambda stats: stats.prefix_hit_tokens,
        "vllm:prefix_cache_hits_total",
    ),
    Metric(
        "decodefleet_preemptions_total",
        "Sequences preempted.",
        lambda stats: stats.preemptions,
        "vllm:num_preemptions_total",
    ),
    Metric(
        "decodefleet_evicted_blocks_total",
        "Cached KV blocks evicted.",
        lambda stats: stats.evicted_blocks,
    ),
    Metric("decodefleet_steps_total", "Engine steps finished.", lambda stats: stats.steps),
    Metric(
        "decodefleet_swapped_sequences_total",
        "Preempted sequences whose KV was kept in a tier below.",
        lambda stats: stats.swapped,
    ),
    Metric(
        "decodefleet_kv_stall_seconds_total",
        "Time for which engines stood still for a copy of KV blocks.",
        lambda stats: stats.tier_stall_s,
    ),
)
WORKER_GAUGES = (
    Metric(
        "decodefleet_sequences_running",
        "Sequences that workers run now.",
        lambda stats: stats.running,
        "vllm:num_requests_running",
    ),
    Metric("decodefleet_sequences_waiting", "Sequences that wait in workers.", lambda stats: stats.waiting),
    Metric(
        "decodefleet_sequences_restoring",
        "Running sequences that wait for KV blocks from a tier below.",
        lambda stats: stats.restoring,
    ),
    Metric("decodefleet_kv_blocks", "KV blocks in all pools.", lambda stats: stats.total_blocks),
    Metric(
        "decodefleet_kv_blocks_free", "KV blocks never used or forgotten.", lambda stats: stats.free_blocks
    ),
    Metric(
        "decodefleet_kv_blocks_cached",
        "KV blocks evictable but findable.",
        lambda stats: stats.cached_blocks,
    ),
)
FINISHED = ("decodefleet_requests_finished_total", "Sequences finished, by reason.")
FINISHED_ALIAS = "vllm:request_success_total"
WAITING_ALIAS = "vllm:num_requests_waiting"
KV_USAGE = ("decodefleet_kv_cache_usage", "Share of KV blocks in use, 0 to 1.")
KV_USAGE_ALIAS = "vllm:kv_cache_usage_perc"
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
            _count_worker(rest, model, stats)
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
            _count_worker(self._base, *self._workers.pop(key))


def _parsed(text: str) -> Exposition | None:
    try:
        return parse(text)
    except ValueError as error:
        log.warning("a router's metrics cannot be read: %s", error)
        return None


def _count_worker(out: Exposition, model: str, stats: WorkerStats) -> None:
    labels = {"model_name": model}
    for metric in WORKER_COUNTERS:
        for name in filter(None, (metric.name, metric.alias)):
            out.record(name, "counter", metric.documentation, metric.value(stats), labels)
    for reason, count in stats.finished.items():
        by_reason = labels | {"finished_reason": reason}
        out.record(FINISHED[0], "counter", FINISHED[1], count, by_reason)
        out.record(FINISHED_ALIAS, "counter", FINISHED[1], count, by_reason)
    count_tiers(out, stats, labels)


def _gauge_fleet(out: Exposition, core: GlobalScheduler) -> None:
    used: dict[str, int] = {}
    total: dict[str, int] = {}
    for member in core.fleet:
        model, stats = member.card.name, member.stats
        for metric in WORKER_GAUGES:
            for name in filter(None, (metric.name, metric.alias)):
                out.record(name, "gauge", metric.documentation, metric.value(stats), {"model_name": model})
        out.record(WAITING_ALIAS, "gauge", QUEUE_LENGTH[1], stats.waiting, {"model_name": model})
        gauge_tiers(out, stats, {"model_name": model})
        used[model] = used.get(model, 0) + stats.total_blocks - stats.free_blocks - stats.cached_blocks
        total[model] = total.get(model, 0) + stats.total_blocks
    for waiter in core.queue:
        out.record(
            WAITING_ALIAS, "gauge", QUEUE_LENGTH[1], waiter.demand.n, {"model_name": waiter.demand.model}
        )
    for model in total:
        usage = used[model] / total[model] if total[model] else 0.0
        for name in (KV_USAGE[0], KV_USAGE_ALIAS):
            out.record(name, "gauge", KV_USAGE[1], usage, {"model_name": model})


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
