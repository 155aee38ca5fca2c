"""What the scheduler believes of a worker and of a request, as immutable snapshots that policies read.

A worker's load is what the scheduler has reserved there, plus what its last report showed beyond that
(requests of an earlier scheduler, say). Reservations are exact and in time; reports are late by a heartbeat
and must neither be added to reservations nor replace them, nor bring back what has ended since. Decides
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from decodefleet.worker.protocol import ModelCard, StepTime, WorkerStats

_UNLIMITED = float("inf")


class WorkerKey(NamedTuple):
    """One life of one worker: what is known of another incarnation is worthless."""

    worker_id: str
    incarnation: str


class Load(msgspec.Struct, frozen=True, gc=False):
    """Work on a worker.

    prefill_tokens: prompt tokens not computed yet.
    sequences: running or about to run.
    kv_tokens: tokens of context that a decode step reads.
    blocks: KV blocks taken, or expected to be.
    """

    prefill_tokens: int = 0
    sequences: int = 0
    kv_tokens: int = 0
    blocks: int = 0

    def __add__(self, other: Load) -> Load:
        return Load(
            self.prefill_tokens + other.prefill_tokens,
            self.sequences + other.sequences,
            self.kv_tokens + other.kv_tokens,
            self.blocks + other.blocks,
        )

    def __sub__(self, other: Load) -> Load:
        return Load(
            self.prefill_tokens - other.prefill_tokens,
            self.sequences - other.sequences,
            self.kv_tokens - other.kv_tokens,
            self.blocks - other.blocks,
        )

    def beyond(self, other: Load) -> Load:
        """The part of this load that `other` does not account for.

        Without sequences beyond those of `other` there are no tokens beyond its either: a worker counts a
        waiting prompt whole until it finds what of it is cached, and who reserved has left that out already.
        """
        rest = self - other
        if rest.sequences <= 0:
            return Load(blocks=max(0, rest.blocks))
        return Load(
            max(0, rest.prefill_tokens),
            max(0, rest.sequences),
            max(0, rest.kv_tokens),
            max(0, rest.blocks),
        )


NO_LOAD = Load()


def reported_load(stats: WorkerStats) -> Load:
    """The load a worker sees itself."""
    return Load(
        prefill_tokens=stats.waiting_prefill_tokens,
        sequences=stats.running + stats.waiting,
        kv_tokens=stats.running_kv_tokens,
        blocks=stats.total_blocks - stats.free_blocks - stats.cached_blocks,
    )


class Hit(msgspec.Struct, frozen=True, gc=False):
    """Leading full blocks of a prompt that a worker holds: anywhere, in GPU memory, in that or the host's.

    peer_blocks: those that it would have with what it fetches from another worker; 0 where it computes.
    """

    blocks: int = 0
    gpu_blocks: int = 0
    memory_blocks: int = 0
    peer_blocks: int = 0


NO_HIT = Hit()
Hits = Mapping[WorkerKey, Hit]


class Demand(msgspec.Struct, frozen=True, gc=False):
    """What a request asks of a worker.

    expected_tokens: output of one sequence, as far as can be foreseen.
    """

    model: str
    prompt_tokens: int
    expected_tokens: int
    n: int = 1

    @property
    def mean_context(self) -> int:
        """Tokens before the one in the middle of the answer."""
        return self.prompt_tokens + self.expected_tokens // 2


class WorkerView(msgspec.Struct, frozen=True, gc=False):
    """One live worker at one moment.

    load: reserved plus reported beyond that. last_heartbeat: on the scheduler's clock.
    last_placed: number of the latest placement here (placements are numbered from 1), 0 before the first.
    """

    key: WorkerKey
    endpoint: str
    card: ModelCard
    stats: WorkerStats
    load: Load
    step_time: StepTime
    last_heartbeat: float
    last_placed: int = 0

    @property
    def headroom_blocks(self) -> int:
        return self.stats.total_blocks - self.load.blocks

    def cached_tokens(self, demand: Demand, hit: Hit) -> int:
        """Prompt tokens that need no computing here: at least one has to be computed in any case."""
        blocks = max(hit.blocks, hit.peer_blocks)
        return min(blocks * self.card.block_size, demand.prompt_tokens - 1)

    def load_of(self, demand: Demand, hit: Hit) -> Load:
        """What the request would add."""
        new_tokens = demand.prompt_tokens + demand.expected_tokens * demand.n - self._shared(demand, hit)
        return Load(
            prefill_tokens=demand.prompt_tokens - self.cached_tokens(demand, hit),
            sequences=demand.n,
            kv_tokens=demand.n * self.card.tokens_read(demand.mean_context),
            blocks=self.card.blocks_for(new_tokens, demand.n),
        )

    @property
    def start_s(self) -> float:
        """Seconds of prefill before a new request's own."""
        return self.load.prefill_tokens * self.step_time.prefill_token

    @property
    def step_s(self) -> float:
        """Seconds of a decode step of what runs here."""
        step, load = self.step_time, self.load
        return step.base + load.kv_tokens * step.kv_token + load.sequences * step.sequence

    def free_sequences(self, demand: Demand) -> float:
        """How many more like the request's there is room for, if nothing of them is cached."""
        stats, load = self.stats, self.load
        seats = _UNLIMITED if stats.max_running is None else stats.max_running - load.sequences
        each = self.card.blocks_for(demand.prompt_tokens + demand.expected_tokens)
        fitting = max(0, min(seats, self.headroom_blocks // each))
        # see `fits`
        return fitting if load.sequences else max(1, fitting)

    def fits(self, demand: Demand, hit: Hit) -> bool:
        """Whether it could run at once, without queueing behind this worker's own memory.

        An idle worker takes any prompt that its pool holds at all, whatever is expected to follow, so that
        no request waits for ever for room that no worker has.
        """
        stats, sequences, card = self.stats, self.load.sequences, self.card
        if 0 < stats.total_blocks < card.blocks_for(demand.prompt_tokens + 1):
            return False
        if sequences == 0:
            return True
        if stats.max_running is not None and sequences + demand.n > stats.max_running:
            return False
        new_tokens = demand.prompt_tokens + demand.expected_tokens * demand.n
        if hit.gpu_blocks:
            new_tokens -= self._shared(demand, hit)
        return card.blocks_for(new_tokens, demand.n) <= self.headroom_blocks

    def _shared(self, demand: Demand, hit: Hit) -> int:
        """Prompt tokens that take no new memory: what comes from below the GPU does."""
        return min(hit.gpu_blocks * self.card.block_size, demand.prompt_tokens - 1)
