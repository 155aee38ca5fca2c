"""The way down: named blocks of the main pool are copied to host memory, and from there to the slab file.

Blocks are offered when they get their names and copied while they are of use, not when they are evicted:
eviction then costs nothing, and no step waits for a copy. What is waiting are names, not blocks; a block that
is evicted before its turn is lost. A block that is being copied is not written by a step (`settle`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

from ..block_pool import BlockPool
from .slots import Entry
from .store import Kind, Outcome, Piece
from .tier import Tier
from .transfers import Transfer, Transfers
from .writer import Writer

# blocks of one job: few, since a step may have to wait for the one that copies a block it wants
BATCH = 8
# blocks on their way at once
MOST_COPIES = 64


class Leaving(NamedTuple):
    """A block whose sequence has to give it back. private: its name means something to that one alone."""

    name: bytes
    block: int
    silent: bool = False
    private: bool = False


class Saver:
    """writer: None without a slab file. All methods belong to the engine's thread."""

    def __init__(
        self,
        pool: BlockPool,
        cpu: Tier,
        transfers: Transfers,
        slab_bytes: int,
        writer: Writer | None,
    ) -> None:
        self.stall_s = 0.0
        self.overtaken = 0
        self._pool = pool
        self._cpu = cpu
        self._transfers = transfers
        self._slab_bytes = slab_bytes
        self._writer = writer
        # names, and whether they are silent
        self._waiting: dict[bytes, bool] = {}
        self._copying: dict[int, tuple[Transfer, list[Entry]]] = {}

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._copying) or (self._writer is not None and self._writer.busy)

    def offer(self, name: bytes, silent: bool) -> None:
        """A block of the pool has got its name; what it holds is there once the steps submitted have run."""
        if self._cpu.keeps and not self._cpu.holds(name):
            self._waiting[name] = silent
            if len(self._waiting) > self._pool.total:
                # names of blocks that are gone, where nothing moves any more
                del self._waiting[next(iter(self._waiting))]
                self.overtaken += 1

    def advance(self) -> None:
        """Start what there is room for."""
        if self._waiting and len(self._copying) < MOST_COPIES:
            while self._waiting and len(self._copying) < MOST_COPIES:
                if not self._start_batch():
                    break
        if self._writer is not None:
            self._writer.advance()

    def settle(self, blocks: Iterable[int]) -> None:
        """Waits until none of these blocks is being copied: the next step may write them."""
        if not self._copying:
            return
        copying = {self._copying[block][0] for block in blocks if block in self._copying}
        if copying:
            began = time.perf_counter()
            for transfer in copying:
                self._transfers.wait(transfer)
            self.stall_s += time.perf_counter() - began

    def evacuate(self, leaving: Sequence[Leaving]) -> bool:
        """Save blocks that the very next step may write, if there is a slot for each; whether there was."""
        if not self._cpu.keeps:
            return False
        entries, pieces, public = [], [], []
        complete = True
        for name, block, silent, private in leaving:
            if self._cpu.holds(name):
                continue
            entry = self._cpu.reserve(name, silent=silent or private)
            if entry is None:
                complete = False
                continue
            self._waiting.pop(name, None)
            entries.append(entry)
            pieces.append(Piece(block=block, host=entry.slot))
            if not private:
                public.append(entry)
        if not entries:
            return complete
        began = time.perf_counter()
        self._transfers.start(Kind.EVACUATE, pieces, partial(self._saved, entries, public))
        self.stall_s += time.perf_counter() - began
        return complete

    def clear(self) -> None:
        """Forget what waits."""
        self._waiting.clear()
        if self._writer is not None:
            self._writer.clear()

    def _start_batch(self) -> bool:
        """One job of the oldest names; False where no slot is to be had."""
        entries: list[Entry] = []
        blocks: list[int] = []
        while self._waiting and len(entries) < BATCH:
            name = next(iter(self._waiting))
            block = self._pool.find(name)
            if block is None or self._cpu.holds(name):
                self.overtaken += block is None
                del self._waiting[name]
                continue
            entry = self._cpu.reserve(name, silent=self._waiting[name])
            if entry is None:
                break
            del self._waiting[name]
            entries.append(entry)
            blocks.append(block)
        if not entries:
            return False
        pieces = [Piece(block, entry.slot) for block, entry in zip(blocks, entries, strict=True)]
        transfer = self._transfers.start(Kind.SAVE, pieces, partial(self._copied, entries, blocks))
        self._copying.update(dict.fromkeys(blocks, (transfer, entries)))
        return True

    def _copied(self, entries: list[Entry], blocks: list[int], outcome: Outcome) -> None:
        for block in blocks:
            # a later copy of the same block may have been started before this one's end was noticed
            if block in self._copying and self._copying[block][1] is entries:
                del self._copying[block]
        self._saved(entries, entries, outcome)

    def _saved(self, entries: list[Entry], public: list[Entry], outcome: Outcome) -> None:
        if isinstance(outcome, BaseException):
            self._cpu.fail(outcome)
            self._waiting.clear()
        self._cpu.filled(entries, len(entries) * self._slab_bytes)
        if self._writer is not None:
            self._writer.offer(entry for entry in public if not entry.discarded)
