"""The way up: blocks that a waiting sequence needs are copied back into the main pool.

A load owns a reference to its target block from start to end, so that the block is nobody else's even if the
sequence goes away; sequences that need the same block wait for the same load. A load that fails is a miss.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import NamedTuple

from ..block_pool import BlockPool
from .slots import Entry
from .store import Kind, Moved, Outcome, Piece
from .tier import Tier
from .transfers import Transfer, Transfers

# blocks of one job: few, so that jobs of one sequence run beside each other
BATCH = 4
# without the end of any job of a tier that has jobs; at most so much of it between two looks, since a process
# that was frozen has not waited
PATIENCE_S = 20.0
MOST_WAITED_S = 5.0
# that the engine stands still for copies whose sequence is gone, where it is short of memory
RECLAIM_S = 1.0


class Wanted(NamedTuple):
    """What is to be brought back, and where to; fields as in `Load`."""

    name: bytes
    block: int
    depth: int = 0
    private: bool = False


@dataclass(eq=False)
class Load:
    """One block on its way up. depth: blocks before it in its chain. private: not to be found by others.

    wanted: sequences that wait for it. ended: whether it is over; arrived: whether the block is there.
    """

    name: bytes
    block: int
    depth: int = 0
    private: bool = False
    wanted: int = 1
    ended: bool = False
    arrived: bool = False
    job: _Job | None = field(default=None, repr=False)

    @property
    def hopeless(self) -> bool:
        """Whether it is under way from a tier that was given up."""
        return self.job is not None and not self.job.tier.alive


@dataclass(eq=False)
class _Job:
    tier: Tier
    loads: list[Load]
    entries: list[Entry]
    transfer: Transfer | None = None
    ended: bool = False

    @property
    def wanted(self) -> bool:
        return any(load.wanted for load in self.loads)


class Loader:
    """All methods belong to the engine's thread.

    ways: how each tier's slots get into blocks. on_arrival: hears which named block is back, and whether it
    is silent.
    """

    def __init__(
        self,
        pool: BlockPool,
        transfers: Transfers,
        ways: dict[Tier, Kind],
        slab_bytes: int,
        on_arrival: Callable[[bytes, bool], None] | None,
    ) -> None:
        self.patience_s = PATIENCE_S
        self._looked = time.perf_counter()
        self._on_arrival = on_arrival
        self._pool = pool
        self._transfers = transfers
        self._ways = ways
        self._slab_bytes = slab_bytes
        self._loads: set[Load] = set()
        self._under_way: dict[bytes, Load] = {}
        self._bursts = {tier: _Burst() for tier in ways}

    def queued_bytes(self, tier: Tier) -> int:
        """What has to be moved before anything that is asked for now."""
        return self._bursts[tier].jobs * BATCH * self._slab_bytes

    def find(self, name: bytes) -> Load | None:
        """The load of a block that is under way already; who waits for it says so with `join`."""
        load = self._under_way.get(name)
        return None if load is None or load.hopeless else load

    def check_progress(self) -> None:
        """A tier that has not answered for long is given up. Its loads keep their blocks until it does."""
        now = time.perf_counter()
        waited, self._looked = min(now - self._looked, MOST_WAITED_S), now
        for tier, burst in self._bursts.items():
            burst.waited_s += waited
            if burst.jobs and burst.waited_s > self.patience_s:
                tier.fail(TimeoutError(f"it has not answered for {self.patience_s:g} s"))

    @property
    def blocks(self) -> list[int]:
        """Targets of what is under way: one reference each is a load's."""
        return [load.block for load in self._loads]

    def start(self, wanted: Sequence[Wanted]) -> list[Load]:
        """Loads of blocks each of which some tier holds; the target blocks are the caller's."""
        loads = [Load(*each) for each in wanted]
        self._pool.share([load.block for load in loads])
        placed = [(load, *self._locate(load.name)) for load in loads]
        for tier, group in groupby(placed, key=lambda each: each[1]):
            members = [*group]
            for first in range(0, len(members), BATCH):
                batch = members[first : first + BATCH]
                job = _Job(tier, [load for load, _, _ in batch], [entry for _, _, entry in batch])
                self._start_job(job)
        self._loads.update(loads)
        self._under_way.update((load.name, load) for load in loads)
        return loads

    def join(self, load: Load) -> None:
        """One more sequence waits for this load and shares its block."""
        load.wanted += 1
        self._pool.share([load.block])

    def leave(self, loads: Iterable[Load]) -> None:
        """One sequence less waits for these; jobs that nobody waits for are not begun."""
        left: set[_Job] = set()
        for load in loads:
            load.wanted -= 1
            if load.job is not None:
                left.add(load.job)
        for job in left:
            if not job.wanted and job.transfer is not None and self._transfers.cancel(job.transfer):
                self._ended(job, CancelledError())

    def reclaim(self) -> bool:
        """Waits for jobs that were begun and that nobody waits for any more; whether there were any."""
        jobs = {load.job for load in self._loads if load.job is not None and not load.job.wanted}
        for job in jobs:
            if job.transfer is not None and job.tier.alive:
                self._transfers.wait(job.transfer, RECLAIM_S)
        if jobs:
            self._transfers.poll()
        return bool(jobs)

    def _locate(self, name: bytes) -> tuple[Tier, Entry]:
        for tier in self._ways:
            entry = tier.slots.find(name)
            if entry is not None:
                tier.slots.touch(name)
                return tier, tier.slots.pin(entry)
        raise KeyError(name)

    def _start_job(self, job: _Job) -> None:
        kind, burst = self._ways[job.tier], self._bursts[job.tier]
        if not burst.jobs:
            burst.waited_s = 0.0
        burst.jobs += 1
        pieces = []
        for load, entry in zip(job.loads, job.entries, strict=True):
            load.job = job
            pieces.append(_piece(kind, load, entry.slot))
        job.transfer = self._transfers.start(kind, pieces, partial(self._ended, job))

    def _ended(self, job: _Job, outcome: Outcome) -> None:
        if job.ended:
            return
        job.ended = True
        tier, burst = job.tier, self._bursts[job.tier]
        burst.jobs -= 1
        burst.waited_s = 0.0
        arrived = [False] * len(job.loads)
        if isinstance(outcome, Moved):
            arrived = outcome.arrived
            size = sum(arrived) * self._slab_bytes
            tier.restored_blocks += sum(arrived)
            tier.restored_bytes += size
            burst.note(outcome, size)
            if not burst.jobs:
                burst.teach(tier)
        elif not isinstance(outcome, CancelledError):
            tier.fail(outcome)
        for load, entry, there in zip(job.loads, job.entries, arrived, strict=True):
            tier.slots.unpin(entry)
            if not there and isinstance(outcome, Moved):
                tier.discard_corrupt(load.name)
            self._end(load, there, silent=entry.silent)

    def _end(self, load: Load, arrived: bool, *, silent: bool) -> None:
        self._loads.remove(load)
        if self._under_way.get(load.name) is load:
            del self._under_way[load.name]
        load.ended, load.arrived, load.job = True, arrived, None
        if arrived and not load.private:
            self._pool.commit(load.block, load.name, load.depth, silent=silent)
            if self._on_arrival is not None:
                self._on_arrival(load.name, silent)
        self._pool.release([load.block])


def _piece(kind: Kind, load: Load, source: int) -> Piece:
    match kind:
        case Kind.LOAD:
            return Piece(load.block, host=source, name=load.name)
        case Kind.READ:
            return Piece(load.block, file=source, name=load.name)
        case _:
            return Piece(load.block, offer=source, name=load.name)


class _Burst:
    """Jobs of one tier that ran without a pause between them: together they tell its bandwidth."""

    def __init__(self) -> None:
        self.jobs = self._size = 0
        self.waited_s = 0.0
        self._began, self._ended = float("inf"), 0.0

    def note(self, moved: Moved, size: int) -> None:
        self._began, self._ended = min(self._began, moved.began), max(self._ended, moved.ended)
        self._size += size

    def teach(self, tier: Tier) -> None:
        if self._size:
            tier.link.observe(self._size, self._ended - self._began)
        self._began, self._ended, self._size = float("inf"), 0.0, 0
