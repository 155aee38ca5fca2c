"""What a worker tells of its state, on the wire and to its own parts. Torch-free.

Fields are only ever added, with defaults, as in `protocol.py`, which hands these types on.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Tier = Literal["gpu", "cpu", "nvme", "peer"]

# a step that takes this many times its prediction is a hang and not a long prefill
HANG_FACTOR = 20.0


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted seconds of one engine step: base + prefill·tokens + kv_read·tokens + sequence·decodes."""

    base: float
    prefill_token: float
    kv_token: float
    sequence: float

    def seconds(self, prefill_tokens: int, kv_tokens: int, sequences: int) -> float:
        return (
            self.base
            + self.prefill_token * prefill_tokens
            + self.kv_token * kv_tokens
            + self.sequence * sequences
        )


class TierStats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One KV tier below the main pool; counters are cumulative.

    total_blocks: 0 where the tier was switched off. used_blocks: held, or on their way here.
    restored_blocks: brought back to the main pool. corrupt_blocks: whose checksum was wrong when read.
    evicted: blocks that gave way to others, by what that meant: "kept" in a tier below, or "lost".
    latency_s, bytes_per_s: of the way back to the main pool, as measured.

    The tier "peer" is other workers' memory: used_blocks are those that somebody is said to hold, restored
    ones were fetched, and stored_bytes were lent.
    """

    total_blocks: int = 0
    used_blocks: int = 0
    restored_blocks: int = 0
    stored_bytes: int = 0
    restored_bytes: int = 0
    corrupt_blocks: int = 0
    evicted: dict[str, int] = {}
    latency_s: float = 0.0
    bytes_per_s: float = 0.0


class WorkerStats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker's state at one moment; counters are cumulative since its start.

    waiting_prefill_tokens: prompt tokens not computed yet, of waiting and running sequences together.
    running_kv_tokens: tokens in the KV cache of running sequences.
    free_blocks, cached_blocks: never used or forgotten; evictable but findable. Both can be allocated.
    max_running: most sequences it runs at once; None where nothing but memory limits it.
    max_step_tokens: most tokens that one step computes; None where it is not known.
    steps: engine steps finished; with `busy_for_s` (age in s of the step under way, None between steps) it
        tells a hang from a long prefill.
    restoring: sequences among `running` that wait for KV blocks from a lower tier.
    swapped: preemptions whose KV was kept below, to be brought back.
    tiers: KV memory below the main pool, by name; empty where there is none.
    lost_blocks: of `evicted_blocks`, those of which no tier below has a copy.
    tier_stall_s: seconds for which the engine stood still for a copy.
    """

    running: int = 0
    waiting: int = 0
    waiting_prefill_tokens: int = 0
    running_kv_tokens: int = 0
    total_blocks: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    max_running: int | None = None
    draining: bool = False
    steps: int = 0
    busy_for_s: float | None = None
    step_time: StepTime | None = None
    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    evicted_blocks: int = 0
    finished: dict[str, int] = {}
    restoring: int = 0
    swapped: int = 0
    tiers: dict[Tier, TierStats] = {}
    lost_blocks: int = 0
    tier_stall_s: float = 0.0
    max_step_tokens: int | None = None

    def overdue(self, least_s: float) -> bool:
        """Whether the step under way takes so much longer than it should that the engine must hang: longer
        than `least_s`, and many times what was predicted of the largest step there can be."""
        if self.busy_for_s is None or self.busy_for_s <= least_s:
            return False
        prefill = self.waiting_prefill_tokens
        if self.max_step_tokens is not None:
            prefill = min(prefill, self.max_step_tokens)
        step = self.step_time
        predicted = 1.0 if step is None else step.seconds(prefill, self.running_kv_tokens, self.running)
        return self.busy_for_s > HANG_FACTOR * predicted


class RouterCounts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A router's counts since its start, from which the fleet's recent past is drawn.

    requests, failures: generations begun, and those that ended with an error.
    ttft, itl: how many first tokens and gaps between tokens fell into each of the router's buckets.
    """

    requests: int = 0
    failures: int = 0
    ttft: tuple[int, ...] = ()
    itl: tuple[int, ...] = ()
