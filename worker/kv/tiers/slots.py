"""The accounts of one tier: which block is in which slot, which are busy, and which goes next (LRU).

A slot is free, being filled, or filled; a filled one is findable by its block's name. A pinned entry (being
filled, read or written on) is not evicted, and its slot not used again, even after its name was discarded.
Knows nothing of bytes, threads or files. One thread calls it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class Entry:
    """A block in a slot; a handle that stays valid while pinned. silent: nobody outside is told of it."""

    name: bytes
    slot: int
    silent: bool = False
    pins: int = 0
    filled: bool = False
    discarded: bool = False


class Slots:
    """Slots are integers in [0, total); all methods keep `check_integrity` true."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        # oldest use first
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()
        self._leaving: set[Entry] = set()

    def __len__(self) -> int:
        """Blocks held or arriving."""
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        """Whether the block is held or arriving."""
        return name in self._entries

    def find(self, name: bytes) -> Entry | None:
        """The filled slot of this block."""
        entry = self._entries.get(name)
        return entry if entry is not None and entry.filled else None

    def touch(self, name: bytes) -> None:
        """The block is of use: it goes last. Unknown names are ignored."""
        if name in self._entries:
            self._entries.move_to_end(name)

    def adopt(self, entries: Iterable[Entry]) -> None:
        """Free slots turn out to hold these blocks, oldest use first."""
        self._entries.update((entry.name, entry) for entry in entries)
        taken = set(_slots(self._entries.values()))
        self._free = [slot for slot in self._free if slot not in taken]

    def reserve(self, name: bytes, *, silent: bool = False) -> tuple[Entry, Entry | None] | None:
        """A slot to be filled, pinned, and who was evicted for it; None where all are busy."""
        assert name not in self._entries
        evicted = None
        if not self._free:
            evicted = next((entry for entry in self._entries.values() if not entry.pins), None)
            if evicted is None:
                return None
            self.discard(evicted.name)
        entry = self._entries[name] = Entry(name, self._free.pop(), silent, pins=1)
        return entry, evicted

    def fill(self, entry: Entry) -> bool:
        """What was reserved has arrived; False where it was discarded meanwhile."""
        entry.filled = True
        self.unpin(entry)
        return not entry.discarded

    def pin(self, entry: Entry) -> Entry:
        entry.pins += 1
        return entry

    def unpin(self, entry: Entry) -> None:
        assert entry.pins > 0
        entry.pins -= 1
        if entry.discarded and not entry.pins:
            self._leaving.remove(entry)
            self._free.append(entry.slot)

    def discard(self, name: bytes) -> Entry | None:
        """Forget a block, if it is known. A busy slot is free once nobody uses it any more."""
        entry = self._entries.pop(name, None)
        if entry is None:
            return None
        entry.discarded = True
        if entry.pins:
            self._leaving.add(entry)
        else:
            self._free.append(entry.slot)
        return entry

    def clear(self) -> list[Entry]:
        """Forget all blocks; returns those that were findable."""
        entries = [*self._entries.values()]
        for entry in entries:
            self.discard(entry.name)
        return [entry for entry in entries if entry.filled]

    def check_integrity(self) -> None:
        """Raises AssertionError unless every slot is in one state."""
        held = [*_slots(self._entries.values()), *_slots(self._leaving), *self._free]
        assert sorted(held) == list(range(self.total)), "a slot is in no state, or in two"
        assert all(name == entry.name for name, entry in self._entries.items()), "an entry under a wrong name"
        assert not any(entry.discarded for entry in self._entries.values()), "a discarded block can be found"
        assert all(entry.pins for entry in self._leaving), "a slot leaves and nobody holds it"
        assert all(entry.filled or entry.pins for entry in self._entries.values()), "nobody fills a slot"


def _slots(entries: Iterable[Entry]) -> list[int]:
    return [entry.slot for entry in entries]
