"""What placing a request on a worker costs, in seconds. Pure: (view, demand, hit) -> Cost.

    start    = queued prefill tokens · prefill_token          time until it would start
    restore  = latency + bytes / bandwidth, for each tier     bring back what is cached below GPU memory, or
                                                              fetch it from another worker's, where that is
                                                              faster than computing it
    compute  = the step that computes the uncached rest       base + prefill + the decodes that share it
    slowdown = (PRESENT · running + LATER · mean running)     whom its prefill holds up: who runs there now is
               · uncached · prefill_token                     gone before long, and then it is as full as any
             + PRESENT · running · expected tokens · Δstep    who waits for its share of each decode step
    evict    = EVICTED · uncached · prefill_token             what it writes pushes as much out, which others
                                                              compute again and wait for
    Δstep    = n · (sequence + context · kv_token)        context: in its middle, within the model's windows

The coefficients are the worker's own: its fitted step time, and its tiers as measured. What is compared is
time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from decodefleet.worker.protocol import StepTime, Tier, TierStats

from .candidates import Array, Candidates, Rates
from .view import NO_HIT, Demand, Hit, Hits, WorkerView

# as `/debug/placements` tells it beside the terms
FORMULA = "total = start + restore + compute + slowdown + evict ; seconds, the least wins"

# decision records 0028 and 0037: from sweeps on first halves of traces, reported on the others
PRESENT, LATER, EVICTED = 0.2, 0.5, 2.0

# of an 8B model on one data-centre GPU; used until a worker reports its own
PRIOR = StepTime(base=0.01, prefill_token=1e-4, kv_token=1e-8, sequence=1e-4)

# a fit returns zero for features that moved together; load must stay visible even then
FLOOR = StepTime(base=1e-4, prefill_token=1e-7, kv_token=0.0, sequence=1e-6)

# until a worker reports its own: pinned memory over PCIe 4.0 ×16 as measured by peers, and an NVMe drive
LINKS: dict[Tier, TierStats] = {
    "cpu": TierStats(bytes_per_s=20e9),
    "nvme": TierStats(bytes_per_s=3e9),
    # a network of 10 Gbit/s, and a step of the lender before it looks
    "peer": TierStats(latency_s=0.01, bytes_per_s=1.25e9),
}


class Cost(NamedTuple):
    """Seconds; `first_token_s` is the predicted time to first token."""

    start: float
    restore: float
    compute: float
    slowdown: float
    evict: float

    @property
    def first_token_s(self) -> float:
        return self.start + self.restore + self.compute

    @property
    def total(self) -> float:
        return self.start + self.restore + self.compute + self.slowdown + self.evict


def bounded(step_time: StepTime | None) -> StepTime:
    """A step-time model that can be reckoned with: the prior where there is none, floors where it is nil."""
    if step_time is None:
        return PRIOR
    return StepTime(
        base=max(step_time.base, FLOOR.base),
        prefill_token=max(step_time.prefill_token, FLOOR.prefill_token),
        kv_token=max(step_time.kv_token, FLOOR.kv_token),
        sequence=max(step_time.sequence, FLOOR.sequence),
    )


def fetch_s(view: WorkerView, tokens: int) -> float:
    """Seconds of fetching the KV of so many tokens from another worker's memory."""
    return _moving_s(view, "peer", tokens)


def _moving_s(view: WorkerView, tier: Tier, tokens: int) -> float:
    told = view.stats.tiers.get(tier)
    link = told if told is not None and told.bytes_per_s else LINKS[tier]
    return link.latency_s + tokens * view.card.kv_bytes_per_token / link.bytes_per_s


def restored_from_below(view: WorkerView, hit: Hit) -> tuple[int, float]:
    """Blocks that the worker would bring back rather than compute, and the seconds that takes."""
    blocks, seconds = 0, 0.0
    size, memory = view.card.block_size, max(hit.memory_blocks, hit.gpu_blocks)
    parts: tuple[tuple[Tier, int], ...] = (
        ("cpu", memory - hit.gpu_blocks),
        ("nvme", hit.blocks - memory),
        ("peer", max(0, hit.peer_blocks - hit.blocks)),
    )
    for tier, count in parts:
        moving = _moving_s(view, tier, count * size)
        if count and moving >= count * size * view.step_time.prefill_token:
            break
        if count:
            blocks, seconds = blocks + count, seconds + moving
    return blocks, seconds


def cost_of(view: WorkerView, demand: Demand, hit: Hit, mean_running: float | None = None) -> Cost:
    """mean_running: sequences on a worker of those that were considered; None takes the worker's own."""
    step, load = view.step_time, view.load
    prompt, n, running = demand.prompt_tokens, demand.n, load.sequences
    uncached, restore = prompt, 0.0
    if hit.blocks or hit.peer_blocks:
        blocks = hit.gpu_blocks
        if hit.blocks > blocks or hit.peer_blocks > blocks:
            restored, restore = restored_from_below(view, hit)
            blocks += restored
        # at least one token has to be computed in any case
        uncached -= min(blocks * view.card.block_size, prompt - 1)
    prefill = uncached * step.prefill_token
    sequences = (running + n) * step.sequence
    read = view.card.tokens_read
    compute = step.base + prefill + (load.kv_tokens + read(prompt)) * step.kv_token + sequences
    context = read(demand.mean_context)
    per_step = n * (step.sequence + context * step.kv_token)
    later = LATER * (running if mean_running is None else mean_running)
    slowdown = (PRESENT * running + later) * prefill + PRESENT * running * demand.expected_tokens * per_step
    start = load.prefill_tokens * step.prefill_token
    return Cost(start, restore, compute, slowdown, EVICTED * prefill)


def mean_running(views: Sequence[WorkerView]) -> float:
    return sum(view.load.sequences for view in views) / len(views)


def total_costs(candidates: Candidates, demand: Demand, hits: Hits) -> Array:
    """`cost_of(...).total` of each: what a request without a hit costs is linear in the request."""
    card, mean = candidates.card, candidates.mean_running
    if card is None:
        hit_of = hits.get
        return np.array([cost_of(view, demand, hit_of(view.key, NO_HIT), mean).total for view in candidates])
    prompt, steps = demand.prompt_tokens, PRESENT * demand.expected_tokens * demand.n
    factors = Rates(
        fixed=1,
        prefill_token=(1 + EVICTED + LATER * mean) * prompt,
        kv_token=card.tokens_read(prompt),
        sequence=demand.n,
        running=0,
        running_prefill=PRESENT * prompt,
        running_kv=steps * card.tokens_read(demand.mean_context),
        running_sequence=steps,
    )
    totals: Array = np.array(factors, float) @ candidates.rates
    for row, hit in candidates.hits(hits):
        view = candidates.views[row]
        if hit.gpu_blocks < hit.blocks or hit.peer_blocks > hit.blocks:
            totals[row] = cost_of(view, demand, hit, mean).total
            continue
        weight = 1 + EVICTED + LATER * mean + PRESENT * view.load.sequences
        totals[row] -= view.cached_tokens(demand, hit) * weight * view.step_time.prefill_token
    return totals


def usable(view: WorkerView, hit: Hit) -> Hit:
    """What the worker will use of a hit: what lies too low is computed, and all that is behind it."""
    if hit.blocks <= hit.gpu_blocks and hit.peer_blocks <= hit.blocks:
        return hit
    blocks = hit.gpu_blocks + restored_from_below(view, hit)[0]
    own = min(hit.blocks, blocks)
    return Hit(own, hit.gpu_blocks, min(hit.memory_blocks, own), blocks if blocks > own else 0)
