"""From host memory on to the slab file, one block at a time in a thread of its own.

Knows nothing of the main pool. What is waiting are entries of the host tier, the oldest first. Where that is
large, they may be evicted before their turn; where it is small they stay, and it takes no more than the disk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import partial

from .slots import Entry
from .store import Kind, Outcome, Piece
from .tier import Tier
from .transfers import Transfers

# blocks on their way at once
MOST_WRITES = 32


class Writer:
    """hold: what waits stays in host memory. All methods belong to the engine's thread."""

    def __init__(self, cpu: Tier, nvme: Tier, transfers: Transfers, slab_bytes: int, *, hold: bool) -> None:
        self._cpu = cpu
        self._nvme = nvme
        self._transfers = transfers
        self._slab_bytes = slab_bytes
        self._hold = hold
        self._waiting: deque[Entry] = deque()
        self._writing = 0

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._writing)

    def offer(self, entries: Iterable[Entry]) -> None:
        """These blocks are in host memory now."""
        if not self._nvme.keeps:
            return
        for entry in entries:
            if not self._nvme.holds(entry.name):
                self._waiting.append(self._cpu.slots.pin(entry) if self._hold else entry)
        # more than there are slots have been evicted while they waited
        while len(self._waiting) > self._cpu.slots.total:
            self._waiting.popleft()

    def advance(self) -> None:
        """Start what there is room for; what was evicted from host memory meanwhile is lost."""
        while self._waiting and self._writing < MOST_WRITES:
            source = self._waiting.popleft()
            target = None
            if not (source.discarded or self._nvme.holds(source.name)):
                target = self._nvme.reserve(source.name, silent=source.silent)
            if target is not None:
                self._start(source, target)
            if self._hold:
                self._cpu.slots.unpin(source)

    def clear(self) -> None:
        """Forget what waits."""
        if self._hold:
            for entry in self._waiting:
                self._cpu.slots.unpin(entry)
        self._waiting.clear()

    def _start(self, source: Entry, target: Entry) -> None:
        self._cpu.slots.pin(source)
        self._writing += 1
        piece = Piece(host=source.slot, file=target.slot, name=target.name, silent=target.silent)
        self._transfers.start(Kind.WRITE, [piece], partial(self._written, source, target))

    def _written(self, source: Entry, target: Entry, outcome: Outcome) -> None:
        self._writing -= 1
        self._cpu.slots.unpin(source)
        if isinstance(outcome, BaseException):
            self._nvme.fail(outcome)
            self.clear()
        self._nvme.filled([target], self._slab_bytes)
