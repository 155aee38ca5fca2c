"""What /metrics says of KV tiers: the main pool ("gpu", on CPUs too) and the tiers below it, by label.

Names are API. Sums over workers are made elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from decodefleet.worker.protocol import Tier, TierStats, WorkerStats

from .exposition import Exposition

MAIN: Tier = "gpu"


class TierMetric(NamedTuple):
    name: str
    documentation: str
    value: Callable[[TierStats], float]


TIER_COUNTERS = (
    TierMetric(
        "decodefleet_kv_tier_restored_blocks_total",
        "KV blocks that a prefix hit found in this tier and brought back to the main pool.",
        lambda tier: tier.restored_blocks,
    ),
    TierMetric(
        "decodefleet_kv_tier_restored_bytes_total",
        "Bytes of KV brought back from this tier to the main pool.",
        lambda tier: tier.restored_bytes,
    ),
    TierMetric(
        "decodefleet_kv_tier_stored_bytes_total",
        "Bytes of KV written to this tier.",
        lambda tier: tier.stored_bytes,
    ),
    TierMetric(
        "decodefleet_kv_tier_corrupt_blocks_total",
        "KV blocks whose checksum was wrong when read from this tier.",
        lambda tier: tier.corrupt_blocks,
    ),
)
BLOCKS = ("decodefleet_kv_tier_blocks", "KV blocks that this tier has room for; 0 where it was switched off.")
HELD = ("decodefleet_kv_tier_blocks_held", "KV blocks in this tier that hold something.")
BANDWIDTH = (
    "decodefleet_kv_tier_restore_bytes_per_second",
    "Measured bandwidth from this tier to the main pool, of all workers together.",
)
EVICTED = (
    "decodefleet_kv_tier_evicted_blocks_total",
    "KV blocks that gave way to others in this tier: kept in a tier below, or lost.",
)


def count_tiers(out: Exposition, stats: WorkerStats, labels: Mapping[str, str]) -> None:
    """Counters of one worker."""
    lost = stats.lost_blocks if stats.tiers else stats.evicted_blocks
    evicted: dict[Tier, dict[str, int]] = {MAIN: {"kept": stats.evicted_blocks - lost, "lost": lost}}
    for name, tier in stats.tiers.items():
        evicted[name] = {"kept": 0, "lost": 0, **tier.evicted}
        for metric in TIER_COUNTERS:
            out.record(
                metric.name, "counter", metric.documentation, metric.value(tier), {**labels, "tier": name}
            )
    for name, by_fate in evicted.items():
        for fate, count in by_fate.items():
            out.record(EVICTED[0], "counter", EVICTED[1], count, {**labels, "tier": name, "fate": fate})


def gauge_tiers(out: Exposition, stats: WorkerStats, labels: Mapping[str, str]) -> None:
    """Gauges of one living worker."""
    room = {MAIN: (stats.total_blocks, stats.total_blocks - stats.free_blocks)}
    room |= {name: (tier.total_blocks, tier.used_blocks) for name, tier in stats.tiers.items()}
    for name, (total, held) in room.items():
        out.record(BLOCKS[0], "gauge", BLOCKS[1], total, {**labels, "tier": name})
        out.record(HELD[0], "gauge", HELD[1], held, {**labels, "tier": name})
    for name, tier in stats.tiers.items():
        out.record(BANDWIDTH[0], "gauge", BANDWIDTH[1], tier.bytes_per_s, {**labels, "tier": name})
