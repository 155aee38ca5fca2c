"""What is told of a worker, as tables of metric names: for the fleet's sum, and for a port of its own.

Names are API; vLLM's stand beside ours where the meaning is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from decodefleet.worker.protocol import ModelCard, WorkerStats

from .exposition import Exposition
from .tier_metrics import count_tiers, gauge_tiers


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
KV_USAGE = ("decodefleet_kv_cache_usage", "Share of KV blocks in use, 0 to 1.")
KV_USAGE_ALIAS = "vllm:kv_cache_usage_perc"
WAITING_ALIAS = "vllm:num_requests_waiting"
CACHE_INFO = ("vllm:cache_config_info", "Block size and number of KV blocks, as labels.")


def count_worker(out: Exposition, model: str, stats: WorkerStats) -> None:
    """Counters of one worker, living or dead."""
    labels = {"model_name": model}
    for metric in WORKER_COUNTERS:
        for name in filter(None, (metric.name, metric.alias)):
            out.record(name, "counter", metric.documentation, metric.value(stats), labels)
    for reason, count in stats.finished.items():
        by_reason = labels | {"finished_reason": reason}
        out.record(FINISHED[0], "counter", FINISHED[1], count, by_reason)
        out.record(FINISHED_ALIAS, "counter", FINISHED[1], count, by_reason)
    count_tiers(out, stats, labels)


def gauge_worker(out: Exposition, model: str, stats: WorkerStats) -> None:
    """Gauges of one living worker."""
    for metric in WORKER_GAUGES:
        for name in filter(None, (metric.name, metric.alias)):
            out.record(name, "gauge", metric.documentation, metric.value(stats), {"model_name": model})
    gauge_tiers(out, stats, {"model_name": model})


def record_usage(out: Exposition, model: str, used: int, total: int) -> None:
    usage = used / total if total else 0.0
    for name in (KV_USAGE[0], KV_USAGE_ALIAS):
        out.record(name, "gauge", KV_USAGE[1], usage, {"model_name": model})


def used_blocks(stats: WorkerStats) -> int:
    """Blocks of sequences that are under way."""
    return stats.total_blocks - stats.free_blocks - stats.cached_blocks


def worker_text(card: ModelCard, stats: WorkerStats) -> str:
    """One worker's metrics, alone."""
    out, model = Exposition(), card.name
    count_worker(out, model, stats)
    gauge_worker(out, model, stats)
    out.record(
        WAITING_ALIAS, "gauge", "Sequences that wait in workers.", stats.waiting, {"model_name": model}
    )
    record_usage(out, model, used_blocks(stats), stats.total_blocks)
    labels = {
        "model_name": model,
        "block_size": str(card.block_size),
        "num_gpu_blocks": str(stats.total_blocks),
    }
    out.record(CACHE_INFO[0], "gauge", CACHE_INFO[1], 1, labels)
    return out.render()
