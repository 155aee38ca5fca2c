"""Continuous batching: which tokens of which sequences the next step computes.

Each step hands out a token budget: decodes first, then prefill chunks, oldest request first; then waiting
sequences are admitted while memory and budget last. Beside decodes, chunks are cut to what the model of step
times says will not hold them up for long. When memory runs out the newest running sequence is preempted: its
blocks go back, and it is computed again later, but for what is still cached or was kept in a tier below. A
sequence whose blocks are on their way from there runs, but computes nothing until they came.

A plan may be made while the step before it runs. Steps run in order, so blocks that are given back while a
step in flight still uses them can be given to the next: it runs after.

Progress: memory is only ever taken from sequences newer than the one that needs it, so the oldest running
sequence is never preempted, and since a single sequence always fits the pool, it always advances.
Knows nothing of tensors and sockets.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from .config import BatchConfig
from .kv.manager import KvManager
from .protocol import StepTime
from .sequence import Sequence, State


@dataclass(frozen=True)
class Chunk:
    """`count` tokens of a sequence from `start` on; `samples`: they reach its end, so that one is sampled."""

    seq: Sequence
    start: int
    count: int
    samples: bool


@dataclass(frozen=True)
class StepPlan:
    """What one step computes. copies: (source, target) blocks to copy first."""

    chunks: tuple[Chunk, ...]
    copies: tuple[tuple[int, int], ...]

    @property
    def tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)


class Batcher:
    def __init__(self, config: BatchConfig, kv: KvManager) -> None:
        self.config = config
        self.kv = kv
        self.preemptions = 0
        # what steps take, as far as is known; the engine keeps it up to date
        self.step_time: StepTime | None = None
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []

    @property
    def has_room(self) -> bool:
        return len(self.running) < self.config.max_num_seqs

    def add(self, seq: Sequence) -> None:
        insort(self.waiting, seq, key=_order)

    def start_forked(self, seq: Sequence) -> None:
        """A sequence forked from a running one runs at once: its blocks are shared already."""
        seq.state = State.RUNNING
        insort(self.running, seq, key=_order)

    def remove(self, seq: Sequence) -> None:
        """Take a sequence out, whatever its state; its blocks go back."""
        if seq.state is State.FINISHED:
            return
        (self.running if seq.state is State.RUNNING else self.waiting).remove(seq)
        self.kv.release(seq)
        self.kv.forget(seq)
        seq.state = State.FINISHED

    def plan(self) -> StepPlan:
        """The next step; empty when there is nothing to do."""
        self._take_restored()
        chunks: list[Chunk] = []
        budget = self.config.max_num_batched_tokens
        preempted = self.preemptions
        decoding: list[Sequence] = []
        filling: list[Sequence] = []
        for seq in self.running:
            if not seq.restoring:
                (decoding if seq.decoding else filling).append(seq)
        for seq in decoding:
            budget -= self._schedule(seq, budget, chunks)
        if chunks:
            budget = min(budget, self._prefill_beside(decoding))
        for seq in filling:
            budget -= self._schedule(seq, budget, chunks)
        if self.preemptions == preempted:
            self._admit(budget, chunks)
        return StepPlan(
            tuple(chunk for chunk in chunks if chunk.seq.state is State.RUNNING),
            tuple(self.kv.take_copies()),
        )

    def check_integrity(self) -> None:
        """Raises AssertionError unless states, lists and blocks agree."""
        assert all(seq.state is State.RUNNING for seq in self.running), "a stranger runs"
        assert all(seq.state is State.WAITING for seq in self.waiting), "a stranger waits"
        assert self.running == sorted(self.running, key=_order), "running is out of order"
        assert self.waiting == sorted(self.waiting, key=_order), "waiting is out of order"
        assert len(self.running) <= self.config.max_num_seqs, "too many run"
        assert not any(seq.blocks for seq in self.waiting), "a waiting sequence holds memory"
        self.kv.check_integrity(self.running, self.waiting)

    def _schedule(self, seq: Sequence, budget: int, chunks: list[Chunk]) -> int:
        """Give `seq` its share of the budget, at the cost of newer ones if need be; returns tokens given."""
        remaining = seq.remaining
        count = min(remaining, budget)
        # an earlier one may have taken this one's memory
        if not count or seq.state is not State.RUNNING:
            return 0
        while not self.kv.grow(seq, count):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is seq:
                return 0
        chunks.append(Chunk(seq, seq.computed, count, samples=count == remaining))
        return count

    def _admit(self, budget: int, chunks: list[Chunk]) -> None:
        while budget and self.waiting and self.has_room:
            seq = self.waiting[0]
            if not seq.remaining:
                return
            matched = self.kv.match(seq)
            # each running sequence may need a block in its next steps
            if not self.kv.can_admit(seq, matched, reserve=len(self.running)):
                return
            del self.waiting[0]
            self.kv.attach(seq, matched)
            seq.state = State.RUNNING
            insort(self.running, seq, key=_order)
            if not seq.restoring:
                budget -= self._schedule(seq, budget, chunks)

    def _take_restored(self) -> None:
        """Who has got its blocks computes from now on; who lost some waits for admission again."""
        for seq in [seq for seq in self.running if seq.restoring]:
            if not self.kv.settle_restored(seq):
                self._suspend(seq)

    def _prefill_beside(self, decoding: list[Sequence]) -> int:
        """Tokens of prefill that may share a step with these.

        They get as much of it as the decodes take, however slow these are: prompts that crawl would cost more
        than a target that is missed anyway.
        """
        step, target = self.step_time, self.config.itl_target_ms / 1000
        if step is None or not target or not step.prefill_token:
            return self.config.max_num_batched_tokens
        kv_tokens = sum(seq.computed for seq in decoding)
        taken = step.seconds(0, kv_tokens, len(decoding))
        return max(int(max(target - taken, taken) / step.prefill_token), self.kv.block_size)

    def _preempt(self, seq: Sequence) -> None:
        self.preemptions += 1
        self.kv.swap_out(seq)
        self._suspend(seq)

    def _suspend(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.kv.release(seq)
        seq.state = State.WAITING
        insort(self.waiting, seq, key=_order)


def _order(seq: Sequence) -> tuple[int, int, int]:
    return seq.order
