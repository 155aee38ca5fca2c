"""What placing a request on a worker costs, in seconds. Pure: (view, demand, hit) -> Cost.

    start    = queued prefill tokens · prefill_token          time until it would start
    restore  = bytes cached below GPU memory / bandwidth      bring them back
    compute  = the step that computes the uncached rest       base + prefill + the decodes that share it
    slowdown = running · (uncached · prefill_token            everybody there waits for its prefill,
                          + expected tokens · Δstep)          then for its share of each decode step
    Δstep    = n · sequence + context · kv_token

The coefficients are the worker's own fitted step time. No weights: what is compared is time.
"""

from __future__ import annotations

from typing import NamedTuple

from decodefleet.worker.protocol import StepTime

from .view import Demand, Hit, WorkerView

# of an 8B model on one data-centre GPU; used until a worker reports its own
PRIOR = StepTime(base=0.01, prefill_token=1e-4, kv_token=1e-8, sequence=1e-4)

# a fit returns zero for features that moved together; load must stay visible even then
FLOOR = StepTime(base=1e-4, prefill_token=1e-7, kv_token=0.0, sequence=1e-6)

# copy from pinned CPU memory over PCIe 4.0 ×16, as measured by peers; until workers report their own
RESTORE_BYTES_PER_S = 20e9


class Cost(NamedTuple):
    """Seconds; `first_token_s` is the predicted time to first token."""

    start: float
    restore: float
    compute: float
    slowdown: float

    @property
    def first_token_s(self) -> float:
        return self.start + self.restore + self.compute

    @property
    def total(self) -> float:
        return self.start + self.restore + self.compute + self.slowdown


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


def cost_of(view: WorkerView, demand: Demand, hit: Hit) -> Cost:
    step, load = view.step_time, view.load
    prompt, n, running = demand.prompt_tokens, demand.n, load.sequences
    uncached, restore = prompt, 0.0
    if hit.blocks:
        uncached -= view.cached_tokens(demand, hit)
        below = (hit.blocks - hit.gpu_blocks) * view.card.block_size
        restore = below * view.card.kv_bytes_per_token / RESTORE_BYTES_PER_S
    prefill = uncached * step.prefill_token
    sequences = (running + n) * step.sequence
    compute = step.base + prefill + (load.kv_tokens + prompt) * step.kv_token + sequences
    context = prompt + demand.expected_tokens // 2
    per_step = n * (step.sequence + context * step.kv_token)
    slowdown = running * (prefill + demand.expected_tokens * per_step)
    return Cost(load.prefill_tokens * step.prefill_token, restore, compute, slowdown)
