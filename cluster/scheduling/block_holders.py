"""Bitmasks of workers: which bit is whose, and which bits hold a block. The prefix index' inner books."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from .view import WorkerKey

# of a full map, so much more than is needed makes room at a time: a few milliseconds' work
_EVICTED_PART = 1024


def bits(mask: int) -> Iterator[int]:
    """Positions of the bits that are set."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def note_leading(leading: dict[int, int], slots: int, length: int) -> None:
    """Write down that these slots hold `length` leading blocks."""
    if length:
        for slot in bits(slots):
            leading[slot] = length


class Slots:
    """Bit positions for workers; a retired one comes back only after `reuse`."""

    def __init__(self) -> None:
        self.owners: dict[int, WorkerKey] = {}
        self.retired: set[int] = set()
        self.active_mask = 0
        self._by_worker: dict[WorkerKey, int] = {}
        self._free: list[int] = []
        self._count = 0

    def find(self, worker: WorkerKey) -> int | None:
        return self._by_worker.get(worker)

    def of(self, worker: WorkerKey) -> int:
        slot = self._by_worker.get(worker)
        if slot is not None:
            return slot
        if self._free:
            slot = self._free.pop()
        else:
            slot = self._count
            self._count += 1
        self._by_worker[worker] = slot
        self.owners[slot] = worker
        self.active_mask |= 1 << slot
        return slot

    def retire(self, worker: WorkerKey) -> int | None:
        slot = self._by_worker.pop(worker, None)
        if slot is not None:
            del self.owners[slot]
            self.active_mask &= ~(1 << slot)
            self.retired.add(slot)
        return slot

    def reuse(self, slot: int) -> None:
        self.retired.remove(slot)
        self._free.append(slot)

    def check_integrity(self) -> None:
        states = [*self.owners, *self.retired, *self._free]
        assert sorted(states) == list(range(self._count)), "each bit is owned, retired or free"
        assert self.active_mask == sum(1 << slot for slot in self.owners)


class TierMap:
    """hash -> bitmask of holders, and the inverse, so that a worker can be swept out."""

    def __init__(self, max_blocks: int) -> None:
        self.holders: dict[bytes, int] = {}
        # ordered sets: the garbage collector need not look into a dict of bytes, as it would into a set
        self.held: dict[int, dict[bytes, None]] = {}
        self._max_blocks = max_blocks

    def add(self, slot: int, hashes: Iterable[bytes]) -> None:
        bit, holders, held = 1 << slot, self.holders, self.held.setdefault(slot, {})
        for block in hashes:
            mask = holders.get(block)
            # most blocks have one holder, whose bit is kept once and not once for each
            holders[block] = bit if mask is None else mask | bit
            held[block] = None
        excess = len(holders) - self._max_blocks
        if excess > 0:
            self._forget_oldest(excess + self._max_blocks // _EVICTED_PART)

    def discard(self, slot: int, hashes: Iterable[bytes]) -> None:
        held = self.held.get(slot)
        if held is None:
            return
        for block in hashes:
            if block in held:
                del held[block]
                self._drop(block, slot)

    def sweep(self, slot: int, budget: int) -> int:
        """Take up to `budget` blocks from a worker; returns how many."""
        held = self.held.get(slot)
        if held is None:
            return 0
        count = min(budget, len(held))
        for _ in range(count):
            self._drop(held.popitem()[0], slot)
        if not held:
            del self.held[slot]
        return count

    def check_integrity(self) -> None:
        inverse: dict[bytes, int] = {}
        for slot, blocks in self.held.items():
            for block in blocks:
                inverse[block] = inverse.get(block, 0) | 1 << slot
        assert inverse == self.holders, "bitmasks and per-worker sets disagree"
        assert len(self.holders) <= self._max_blocks

    def _drop(self, block: bytes, slot: int) -> None:
        rest = self.holders[block] & ~(1 << slot)
        if rest:
            self.holders[block] = rest
        else:
            del self.holders[block]

    def _forget_oldest(self, count: int) -> None:
        for block in list(islice(self.holders, count)):
            for slot in bits(self.holders.pop(block)):
                del self.held[slot][block]
