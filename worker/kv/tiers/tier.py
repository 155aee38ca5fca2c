"""One tier as its users see it: what it holds, what it tells the world, whether it still works.

A tier that fails is off for good: it says why once, forgets everything, and nothing waits for it. Which bytes
move is the business of `saver.py`, `writer.py` and `loader.py`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable

from ...protocol import EventSink, TierStats
from ...protocol import Tier as TierName
from .cost import Link
from .slots import Entry, Slots

log = logging.getLogger(__name__)


class Tier:
    """link: the way back from here to the main pool. below: where else a block may be when it leaves.

    keeps: whether blocks are worth a place here. sink: None where nobody is told what is here.
    """

    def __init__(
        self, name: TierName, slots: Slots, link: Link, sink: EventSink | None, below: Tier | None = None
    ) -> None:
        self.name = name
        self.slots = slots
        self.link = link
        self.alive = self.keeps = True
        self.stored_bytes = self.restored_bytes = 0
        self.restored_blocks = self.corrupt_blocks = 0
        self.evicted: Counter[str] = Counter()
        self._sink = sink
        self._below = below

    def holds(self, name: bytes) -> bool:
        """Whether the block can be read here, or will be soon."""
        return name in self.slots

    def adopt(self, entries: list[Entry]) -> None:
        """Blocks that were here before this process."""
        self.slots.adopt(entries)
        self._tell(entries, stored=True)

    def reserve(self, name: bytes, *, silent: bool = False) -> Entry | None:
        """A slot to write this block to, if need be that of a block used less recently."""
        reserved = self.slots.reserve(name, silent=silent) if self.alive else None
        if reserved is None:
            return None
        entry, evicted = reserved
        if evicted is not None:
            kept = self._below is not None and self._below.holds(evicted.name)
            self.evicted["kept" if kept else "lost"] += 1
            self._tell([evicted], stored=False)
        return entry

    def filled(self, entries: list[Entry], size: int) -> list[Entry]:
        """What was reserved is written, `size` bytes; returns what can be found here from now on."""
        self.stored_bytes += size
        here = [entry for entry in entries if self.slots.fill(entry)]
        self._tell(here, stored=True)
        return here

    def discard(self, name: bytes) -> None:
        entry = self.slots.discard(name)
        if entry is not None:
            self._tell([entry], stored=False)

    def discard_corrupt(self, name: bytes) -> None:
        """What was read is not what was written."""
        self.corrupt_blocks += 1
        if self.corrupt_blocks == 1:
            log.warning(
                "a block in the %s tier of the KV cache is damaged and will be computed again", self.name
            )
        self.discard(name)

    def clear(self) -> int:
        """Forget all blocks; returns how many could be found."""
        entries = self.slots.clear()
        self._tell(entries, stored=False)
        return len(entries)

    def fail(self, error: BaseException) -> None:
        """Off from now on. Slots in use stay accounted for until their users let go."""
        if self.alive:
            log.warning("the %s tier of the KV cache is switched off: %s", self.name, error or repr(error))
            self.close()

    def close(self) -> None:
        self.alive = self.keeps = False
        self.clear()

    def stats(self) -> TierStats:
        return TierStats(
            total_blocks=self.slots.total if self.alive else 0,
            used_blocks=len(self.slots),
            restored_blocks=self.restored_blocks,
            stored_bytes=self.stored_bytes,
            restored_bytes=self.restored_bytes,
            corrupt_blocks=self.corrupt_blocks,
            evicted=dict(self.evicted),
            latency_s=self.link.latency_s,
            bytes_per_s=self.link.bytes_per_s,
        )

    def _tell(self, entries: Iterable[Entry], *, stored: bool) -> None:
        names = [entry.name for entry in entries if not entry.silent]
        if names and self._sink is not None:
            tell = self._sink.kv_stored if stored else self._sink.kv_removed
            tell(names, self.name)
