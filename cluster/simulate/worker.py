"""A simulated worker: continuous batching, chunked prefill, a paged KV pool, as `worker.batcher` has them.

Steps take what the machine's coefficients say. Steps in which nothing but decoding happens are taken many at
a time, up to the next event. It differs from the real one in that a prompt gets its memory at admission, and
in that answers are not found by later prompts. Time is passed in; knows nothing of schedulers.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from math import sqrt
from typing import NamedTuple, Protocol

from decodefleet.worker.config import BatchConfig
from decodefleet.worker.protocol import WorkerStats
from decodefleet.worker.step_time import StepTimeModel

from .arrivals import Arrival
from .kv_pool import KvPool
from .machine import Machine
from .sequences import Decoding, Sequence

# of the steps between two reports, so many are enough to learn from, which is done after so many
OBSERVED, FIT_AFTER = 4, 16
# the steps of a leap are told in so many pieces
PIECES = 8
# the memory that a running sequence is sure to find, in tokens
RESERVE = 16


class Listener(Protocol):
    """What a worker tells while it works; `at` lies in the past by a step at most."""

    def stepped(self, seconds: float, tokens: int) -> None:
        """A step gave one token to so many sequences that had one before."""
        ...

    def resumed(self, seconds: float) -> None:
        """A preempted sequence got its next token so long after the last."""
        ...

    def started(self, sequence: Sequence) -> None: ...

    def ended(self, sequence: Sequence) -> None: ...


class _Flight(NamedTuple):
    """Steps under way: `length` of them from `began` on, the first takes `first` seconds, each further one
    `growth` more than the one before."""

    began: float
    length: int
    first: float
    growth: float
    chunks: tuple[tuple[Sequence, int], ...]

    def seconds(self, steps: int) -> float:
        return steps * self.first + self.growth * steps * (steps - 1) / 2

    def begun(self, now: float) -> int:
        """Steps that have begun by `now`, one at least."""
        elapsed = max(0.0, now - self.began)
        if not self.growth:
            steps = elapsed / self.first
        else:
            half = self.first / self.growth - 0.5
            steps = sqrt(half * half + 2 * elapsed / self.growth) - half
        return max(1, min(self.length, int(steps) + 1))


class SimulatedWorker:
    """submit, then `settle` at each time that `wakes_at` names; both give what is due next anew."""

    def __init__(self, machine: Machine, batch: BatchConfig, block_size: int, listener: Listener) -> None:
        self.pool = KvPool(machine.kv_tokens // block_size)
        self.preemptions = 0
        self.computed_tokens = 0
        self.busy_s = 0.0
        self._machine, self._batch, self._size = machine, batch, block_size
        self._listener = listener
        self._model = StepTimeModel(machine.step.linear)
        self._step_time = machine.step.linear
        self._observed = self._unfitted = 0
        self._waiting: list[Sequence] = []
        self._filling: list[Sequence] = []
        self._decoding = Decoding(block_size)
        self._flight: _Flight | None = None
        # blocks for the next token of each that decodes, while steps are under way
        self._ahead = 0
        self._settling = False

    @property
    def sequences(self) -> int:
        return len(self._waiting) + len(self._filling) + len(self._decoding)

    @property
    def wakes_at(self) -> float | None:
        """When the steps under way end; None where there is nothing to do."""
        flight = self._flight
        return None if flight is None else flight.began + flight.seconds(flight.length)

    def submit(self, number: int, arrival: Arrival, now: float) -> None:
        insort(self._waiting, Sequence(number, arrival, now), key=_order)
        flight = self._flight
        if flight is None:
            # what ends may bring in the next
            if not self._settling:
                self._launch(now)
        elif flight.length > 1:
            self._flight = flight._replace(length=flight.begun(now))

    def settle(self, now: float) -> None:
        """The steps under way have ended: commit them and begin the next."""
        flight = self._flight
        assert flight is not None
        self._flight, self._settling = None, True
        self._commit(flight)
        self._settling = False
        self._launch(now)

    def stats(self, now: float) -> WorkerStats:
        """As of the last finished step."""
        running = len(self._filling) + len(self._decoding)
        done = 0 if self._flight is None else self._flight.begun(now) - 1
        used = self.pool.used + max(0, self._decoding.blocks_for(done) - self._ahead)
        free = max(0, self.pool.total - used - self.pool.cached)
        self._observed = 0
        if self._unfitted >= FIT_AFTER:
            self._step_time, self._unfitted = self._model.fitted(), 0
        return WorkerStats(
            running=running,
            waiting=len(self._waiting),
            max_running=self._batch.max_num_seqs,
            waiting_prefill_tokens=sum(seq.remaining for seq in (*self._waiting, *self._filling)),
            running_kv_tokens=self._decoding.kv_tokens
            + done * len(self._decoding)
            + sum(seq.computed for seq in self._filling),
            total_blocks=self.pool.total,
            free_blocks=free,
            cached_blocks=self.pool.total - used - free,
            step_time=self._step_time,
            preemptions=self.preemptions,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError unless the pool's accounts are those of the sequences."""
        live = [*self._waiting, *self._filling, *self._decoding]
        nameless = sum(seq.nameless for seq in live) + self._decoding.grown + self._ahead
        self.pool.check_integrity((seq.named for seq in live), nameless)

    def _launch(self, now: float) -> None:
        """Plan what comes next, and take memory for it."""
        chunks = self._plan()
        decoding = self._decoding
        if not chunks and not len(decoding):
            return
        cost = self._machine.step
        count = 1 if chunks else self._leap()
        decodes = len(decoding)
        prefill = sum(tokens for _, tokens in chunks)
        kv_tokens = decoding.kv_tokens + decodes + sum(seq.computed + tokens for seq, tokens in chunks)
        pairs = sum(tokens * seq.computed + tokens * tokens // 2 for seq, tokens in chunks)
        first = cost.linear.seconds(prefill, kv_tokens, decodes) + cost.attention * pairs
        self._observe(first, prefill, kv_tokens, decodes)
        self._flight = _Flight(now, count, first, 0.0 if chunks else cost.kv_token * decodes, chunks)

    def _plan(self) -> tuple[tuple[Sequence, int], ...]:
        """Memory for the decodes of one step, then chunks of prompts within what is left of the step."""
        decoding = self._decoding
        preempted = self._make_room()
        self._ahead = decoding.blocks_for(1)
        self.pool.allocate(self._ahead)
        budget = self._batch.max_num_batched_tokens - len(decoding)
        if len(decoding):
            budget = min(budget, self._prefill_beside())
        chunks: list[tuple[Sequence, int]] = []
        for sequence in self._filling:
            budget -= self._take_chunk(sequence, budget, chunks)
        while not preempted and budget > 0 and self._admit_next():
            budget -= self._take_chunk(self._filling[-1], budget, chunks)
        return tuple(chunks)

    def _take_chunk(self, sequence: Sequence, budget: int, chunks: list[tuple[Sequence, int]]) -> int:
        tokens = min(sequence.remaining, budget)
        if tokens > 0:
            chunks.append((sequence, tokens))
        return max(tokens, 0)

    def _prefill_beside(self) -> int:
        """As `worker.batcher` cuts prefill beside decodes."""
        target, step = self._batch.itl_target_ms / 1000, self._step_time
        if not target or not step.prefill_token:
            return self._batch.max_num_batched_tokens
        taken = step.seconds(0, self._decoding.kv_tokens, len(self._decoding))
        return max(int(max(target - taken, taken) / step.prefill_token), 16)

    def _leap(self) -> int:
        """Steps of nothing but decoding that can be taken at once."""
        decoding, available = self._decoding, self.pool.available + self._ahead
        count = decoding.until_end
        if decoding.blocks_for(count) <= available:
            return count
        low, high = 1, count
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if decoding.blocks_for(middle) <= available else (low, middle)
        return low

    def _make_room(self) -> bool:
        """The newest give way until all others have room for a token more; whether any did."""
        preempted = False
        while self._decoding.blocks_for(1) > self.pool.available:
            self._preempt()
            preempted = True
        return preempted

    def _preempt(self) -> None:
        newest = max((*self._filling, *filter(None, [self._decoding.newest])), key=_order)
        if newest in self._filling:
            self._filling.remove(newest)
        else:
            self._decoding.leave(newest)
        self._give_back(newest)
        newest.computed = newest.published = 0
        insort(self._waiting, newest, key=_order)
        self.preemptions += 1

    def _admit_next(self) -> bool:
        """Start the oldest that waits, if there is room for all its tokens and some for those that run."""
        if not self._waiting or len(self._filling) + len(self._decoding) >= self._batch.max_num_seqs:
            return False
        sequence, size = self._waiting[0], self._size
        # one token at least is computed, for there is something to sample from
        reusable = sequence.chain[: (sequence.known - 1) // size]
        found, revived = self.pool.leading(reusable)
        fresh = -(-sequence.known // size) - found
        reserve = -(-RESERVE * (len(self._filling) + len(self._decoding)) // size)
        if fresh + revived + reserve > self.pool.available:
            return False
        del self._waiting[0]
        sequence.named = reusable[:found]
        self.pool.share(sequence.named)
        self.pool.allocate(fresh)
        sequence.nameless, sequence.published = fresh, found
        sequence.computed = found * size
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.computed
        self._filling.append(sequence)
        return True

    def _commit(self, flight: _Flight) -> None:
        seconds = flight.seconds(flight.length)
        self.busy_s += seconds
        ended_at = flight.began + seconds
        self._commit_decodes(flight, ended_at)
        for sequence, tokens in flight.chunks:
            self.computed_tokens += tokens
            sequence.computed += tokens
            self._publish(sequence)
            if not sequence.remaining:
                self._filling.remove(sequence)
                self._sample(sequence, ended_at)

    def _commit_decodes(self, flight: _Flight, ended_at: float) -> None:
        decoding, count = self._decoding, flight.length
        if not len(decoding):
            return
        self.pool.allocate(decoding.blocks_for(count) - self._ahead)
        self._ahead = 0
        decoding.advance(count)
        for seconds, steps in _pieces(flight):
            self._listener.stepped(seconds, steps * len(decoding))
        for sequence in decoding.take_ended():
            self._end(sequence, ended_at)

    def _sample(self, sequence: Sequence, now: float) -> None:
        """All known tokens are computed: the next one is there."""
        sequence.generated += 1
        if sequence.first_at is None:
            sequence.first_at = now
            self._listener.started(sequence)
        else:
            self._listener.resumed(now - sequence.last_at)
        if sequence.generated >= sequence.arrival.output_tokens:
            self._end(sequence, now)
        else:
            self._decoding.join(sequence)

    def _publish(self, sequence: Sequence) -> None:
        full = min(sequence.computed // self._size, len(sequence.chain))
        if full > sequence.published:
            fresh = self.pool.publish(sequence.chain[sequence.published : full])
            sequence.named += fresh
            sequence.nameless -= len(fresh)
            sequence.published = full

    def _end(self, sequence: Sequence, now: float) -> None:
        sequence.last_at = now
        self._give_back(sequence)
        self._listener.ended(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        self.pool.release(sequence.named, sequence.nameless)
        sequence.named, sequence.nameless = [], 0

    def _observe(self, seconds: float, prefill: int, kv_tokens: int, decodes: int) -> None:
        if self._observed < OBSERVED:
            self._observed += 1
            self._unfitted += 1
            self._model.observe(seconds, prefill, kv_tokens, decodes)


def _order(sequence: Sequence) -> int:
    return sequence.number


def _pieces(flight: _Flight) -> Iterator[tuple[float, int]]:
    """(seconds of a step, so many steps), the slowly growing ones of a leap in a few pieces."""
    done = 0
    for piece in range(1, PIECES + 1):
        until = flight.length * piece // PIECES
        if until > done:
            yield (flight.seconds(until) - flight.seconds(done)) / (until - done), until - done
        done = until
