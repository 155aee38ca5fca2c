"""Where each held block stands in the directory's strings: the publisher's copy of what Redis should hold.

A block keeps its slot from the first news of it until its removal is written (`take`), so that each slot has
one meaning at a time; freed slots are used again, lowest first, so that changes lie side by side. No I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import islice
from typing import NamedTuple

from decodefleet.worker.kv.hashing import HASH_BYTES
from decodefleet.worker.protocol import Tier

from .keys import MASKS, TIERS, tier_bit

# a write costs as much as so many bytes of another: closer changes are written as one
_GAP_BYTES = 64


class Write(NamedTuple):
    """Bytes to be put at an offset of a string."""

    offset: int
    data: bytes


class Changes(NamedTuple):
    """blocks: what changed, with the tiers each is in now. hashes, tiers: what to write for it."""

    blocks: list[tuple[bytes, int]]
    hashes: list[Write]
    tiers: list[Write]


class Slots:
    """`put` news, then `take` it in pieces; `touched` says whether there is any."""

    def __init__(self) -> None:
        self.touched: dict[bytes, int] = {}
        self._slot_of: dict[bytes, int] = {}
        self._hashes = bytearray()
        self._tiers = bytearray()
        self._free: list[int] = []
        self._in_mask = [0] * len(MASKS)

    def __len__(self) -> int:
        """Blocks held in any tier."""
        return sum(self._in_mask[1:])

    @property
    def size(self) -> int:
        """Slots, free ones included."""
        return len(self._tiers)

    def blocks_in(self, tier: Tier) -> int:
        bit = tier_bit(tier)
        return sum(count for mask, count in enumerate(self._in_mask) if mask & bit)

    def put(self, blocks: Iterable[bytes], tier: Tier, *, held: bool) -> None:
        """These blocks are in the tier from now on, or are not. Repeats change nothing."""
        bit = tier_bit(tier)
        for block in blocks:
            slot = self._slot_of.get(block)
            before = 0 if slot is None else self._tiers[slot]
            after = before | bit if held else before & ~bit
            if after == before:
                continue
            if slot is None:
                slot = self._slot_of[block] = self._fresh(block)
            self._in_mask[before] -= before > 0
            self._in_mask[after] += after > 0
            self._tiers[slot] = after
            self.touched[block] = slot

    def take(self, count: int) -> Changes:
        """Up to `count` changed blocks, which count as written from now on."""
        chosen = list(islice(self.touched.items(), count))
        slots = sorted(slot for _, slot in chosen)
        changes = Changes(
            [(block, self._tiers[slot]) for block, slot in chosen],
            [self._write(self._hashes, HASH_BYTES, *run) for run in _runs(slots, _GAP_BYTES // HASH_BYTES)],
            [self._write(self._tiers, 1, *run) for run in _runs(slots, _GAP_BYTES)],
        )
        self._settle(chosen)
        return changes

    def restart(self) -> None:
        """All is to be written (`span`): what was touched is no news any more."""
        self._settle([*self.touched.items()])

    def span(self, start: int, end: int) -> tuple[Write, Write]:
        """What to write for these slots: hashes and tiers."""
        end = min(end, self.size)
        return self._write(self._hashes, HASH_BYTES, start, end), self._write(self._tiers, 1, start, end)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every slot has one meaning."""
        slots = [*self._slot_of.values(), *self._free]
        assert sorted(slots) == list(range(self.size)), "a slot is nobody's, or twice somebody's"
        assert len(self._hashes) == HASH_BYTES * self.size
        for block, slot in self._slot_of.items():
            assert self._hashes[HASH_BYTES * slot : HASH_BYTES * (slot + 1)] == block, "not the slot's block"
            assert self._tiers[slot] or block in self.touched, "a slot is kept for nothing"
        assert not any(self._tiers[slot] for slot in self._free), "a free slot is in a tier"
        for tier in TIERS:
            held = sum(mask & tier_bit(tier) > 0 for mask in self._tiers)
            assert self.blocks_in(tier) == held, f"miscounted in {tier}"

    def _settle(self, written: Iterable[tuple[bytes, int]]) -> None:
        for block, slot in written:
            del self.touched[block]
            if not self._tiers[slot]:
                del self._slot_of[block]
                heappush(self._free, slot)

    def _fresh(self, block: bytes) -> int:
        if self._free:
            slot = heappop(self._free)
            self._hashes[HASH_BYTES * slot : HASH_BYTES * (slot + 1)] = block
            return slot
        self._hashes += block
        self._tiers.append(0)
        return self.size - 1

    @staticmethod
    def _write(data: bytearray, width: int, start: int, end: int) -> Write:
        return Write(width * start, bytes(data[width * start : width * end]))


def _runs(slots: Sequence[int], gap: int) -> Iterator[tuple[int, int]]:
    """(first, end) of ascending slots that lie no more than `gap` apart."""
    if not slots:
        return
    first = end = slots[0]
    for slot in slots:
        if slot > end + gap:
            yield first, end
            first = slot
        end = slot + 1
    yield first, end
