"""Which worker holds which KV block: the scheduler's local copy of the directory, and its own memory.

Per tier one map hash -> bitmask of workers, fed by the directory. Beside it what was dispatched lately: a
worker will hold the whole chain of a prompt that was sent to it, so every fourth block of the chain stands
for it (`STRIDE`), for a short time. Only a prediction: a wrong entry costs a recomputation, never an answer.
Knows nothing of liveness.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice

from decodefleet.worker.kv.hashing import HASH_BYTES
from decodefleet.worker.protocol import Tier

from .view import Hit, WorkerKey

STRIDE = 4
_SWEEP = 20_000


def unpack_hashes(packed: bytes) -> tuple[bytes, ...]:
    """The whole hashes in `packed`; four times as fast as slicing for a thousand blocks."""
    count = len(packed) // HASH_BYTES
    return struct.unpack_from(f"{HASH_BYTES}s" * count, packed)


class PrefixIndex:
    """max_blocks bounds the entries of each tier and, apart from them, of the dispatched chains."""

    def __init__(self, max_blocks: int = 2_000_000) -> None:
        self._slots = _Slots()
        self._max_blocks = max_blocks
        self._tiers: dict[Tier, _TierMap] = {}
        self._recent = _RecentChains(max_blocks // STRIDE)

    def __len__(self) -> int:
        """Block hashes known, of all tiers."""
        return sum(len(tier.holders) for tier in self._tiers.values())

    def stored(self, worker: WorkerKey, hashes: Iterable[bytes], tier: Tier = "gpu") -> None:
        slot = self._slots.of(worker)
        self._tiers.setdefault(tier, _TierMap(self._max_blocks)).add(slot, hashes)

    def removed(self, worker: WorkerKey, hashes: Iterable[bytes], tier: Tier = "gpu") -> None:
        slot = self._slots.find(worker)
        if slot is not None and tier in self._tiers:
            self._tiers[tier].discard(slot, hashes)

    def dispatched(self, worker: WorkerKey, hashes: Sequence[bytes], expires: float) -> None:
        """A prompt was sent there: count its blocks as held until `expires`."""
        if hashes:
            self._recent.add(self._slots.of(worker), hashes, expires)

    def clear(self, worker: WorkerKey) -> None:
        """Forget a worker. Its bit is used again only once every trace of it is swept (`tick`)."""
        slot = self._slots.retire(worker)
        if slot is not None:
            self._recent.forget(slot)

    def tick(self, now: float) -> None:
        """A bounded piece of housekeeping."""
        self._recent.expire(now)
        budget = _SWEEP
        for slot in tuple(self._slots.retired):
            for tier in self._tiers.values():
                budget -= tier.sweep(slot, budget)
            if budget <= 0:
                return
            self._slots.reuse(slot)

    def hits(self, hashes: Sequence[bytes], now: float) -> dict[WorkerKey, Hit]:
        """Leading blocks of the chain per worker that holds any."""
        active = self._slots.active_mask
        if not hashes or not active:
            return {}
        gpu = self._walk(("gpu",), hashes, active)
        for slot, blocks in self._recent.leading(hashes, active, now).items():
            if blocks > gpu.get(slot, 0):
                gpu[slot] = blocks
        owners = self._slots.owners
        below = [tier for tier, held in self._tiers.items() if tier != "gpu" and held.holders]
        if not below:
            return {owners[slot]: Hit(blocks, blocks) for slot, blocks in gpu.items()}
        anywhere = self._walk(("gpu", *below), hashes, active)
        return {
            owners[slot]: Hit(max(anywhere.get(slot, 0), gpu.get(slot, 0)), gpu.get(slot, 0))
            for slot in gpu.keys() | anywhere.keys()
        }

    def _walk(self, tiers: Sequence[Tier], hashes: Sequence[bytes], alive: int) -> dict[int, int]:
        """Leading blocks per slot over the union of `tiers`; stops at the first block that nobody holds."""
        maps = [self._tiers[tier].holders for tier in tiers if tier in self._tiers]
        if not maps:
            return {}
        columns = [map(held.get, hashes) for held in maps]
        leading: dict[int, int] = {}
        length = 0
        if len(columns) == 1:
            merged: Iterable[int | None] = columns[0]
        else:
            merged = (_union(masks) for masks in zip(*columns, strict=True))
        for holders in merged:
            if not holders or not (holders := holders & alive):
                break
            if holders != alive:
                _note(leading, alive & ~holders, length)
                alive = holders
            length += 1
        _note(leading, alive, length)
        return leading

    def check_integrity(self) -> None:
        """Masks and per-worker sets tell the same; retired and free bits are nobody's."""
        for tier in self._tiers.values():
            tier.check_integrity()
        self._slots.check_integrity()
        known = set(self._slots.owners) | self._slots.retired
        for tier in self._tiers.values():
            assert set(tier.held) <= known, "a block is held by an unknown bit"


def _union(masks: Sequence[int | None]) -> int:
    merged = 0
    for mask in masks:
        merged |= mask or 0
    return merged


def _note(leading: dict[int, int], slots: int, length: int) -> None:
    if not length:
        return
    while slots:
        lowest = slots & -slots
        leading[lowest.bit_length() - 1] = length
        slots ^= lowest


class _Slots:
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


class _TierMap:
    """hash -> bitmask of holders, and the inverse, so that a worker can be swept out."""

    def __init__(self, max_blocks: int) -> None:
        self.holders: dict[bytes, int] = {}
        self.held: dict[int, set[bytes]] = {}
        self._max_blocks = max_blocks

    def add(self, slot: int, hashes: Iterable[bytes]) -> None:
        bit, holders, held = 1 << slot, self.holders, self.held.setdefault(slot, set())
        for block in hashes:
            holders[block] = holders.get(block, 0) | bit
            held.add(block)
        excess = len(holders) - self._max_blocks
        if excess > 0:
            self._forget_oldest(excess + self._max_blocks // 64)

    def discard(self, slot: int, hashes: Iterable[bytes]) -> None:
        held = self.held.get(slot)
        if held is None:
            return
        for block in hashes:
            if block in held:
                held.remove(block)
                self._drop(block, slot)

    def sweep(self, slot: int, budget: int) -> int:
        """Take up to `budget` blocks from a worker; returns how many."""
        held = self.held.get(slot)
        if held is None:
            return 0
        count = min(budget, len(held))
        for _ in range(count):
            self._drop(held.pop(), slot)
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
            mask = self.holders.pop(block)
            for slot, held in self.held.items():
                if mask >> slot & 1:
                    held.discard(block)


class _RecentChains:
    """Chains dispatched lately: every STRIDE-th block and the last, each with workers and expiry.

    Chains are closed towards the front, so an entry at block i speaks for all i + 1 leading blocks.
    """

    def __init__(self, max_entries: int) -> None:
        self._until: dict[bytes, dict[int, float]] = {}
        self._queue: deque[tuple[float, int, tuple[bytes, ...]]] = deque()
        self._queued_marks = 0
        self._max_entries = max_entries

    def add(self, slot: int, hashes: Sequence[bytes], expires: float) -> None:
        marks = (*hashes[STRIDE - 1 : -1 : STRIDE], hashes[-1])
        for mark in marks:
            until = self._until.setdefault(mark, {})
            until[slot] = max(expires, until.get(slot, 0.0))
        self._queue.append((expires, slot, marks))
        self._queued_marks += len(marks)
        while self._queued_marks > self._max_entries:
            self._pop(float("inf"))

    def leading(self, hashes: Sequence[bytes], active: int, now: float) -> dict[int, int]:
        leading: dict[int, int] = {}
        if not self._until:
            return leading
        last = len(hashes) - 1
        for position in (*range(STRIDE - 1, last, STRIDE), last):
            until = self._until.get(hashes[position])
            if until is None:
                # the last block of a shorter chain is no mark of a longer one: only strides end the search
                if position != last:
                    break
                continue
            for slot, expires in until.items():
                if expires > now and active >> slot & 1:
                    leading[slot] = position + 1
        return leading

    def forget(self, slot: int) -> None:
        for mark in [mark for mark, until in self._until.items() if slot in until]:
            del self._until[mark][slot]
            if not self._until[mark]:
                del self._until[mark]

    def expire(self, now: float) -> None:
        while self._queue and self._queue[0][0] <= now:
            self._pop(now)

    def _pop(self, now: float) -> None:
        _, slot, marks = self._queue.popleft()
        self._queued_marks -= len(marks)
        for mark in marks:
            until = self._until.get(mark)
            if until is not None and until.get(slot, now) <= now:
                until.pop(slot, None)
                if not until:
                    del self._until[mark]
