"""What was dispatched lately and the directory has not confirmed yet: the scheduler's own memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from .block_holders import note_leading


class RecentChains:
    """Chains dispatched lately, in two generations: an entry lives for one to two turns.

    Chains are closed towards the front: what holds the block at a mark holds all blocks before it.
    """

    def __init__(self, max_entries: int) -> None:
        self._young: dict[bytes, int] = {}
        self._old: dict[bytes, int] = {}
        self._max_entries = max_entries

    def add(self, slot: int, hashes: Sequence[bytes]) -> None:
        bit, young = 1 << slot, self._young
        for position in marks(len(hashes)):
            mark = hashes[position]
            young[mark] = young.get(mark, 0) | bit
        if len(young) > self._max_entries // 2:
            self.turn()

    def turn(self) -> None:
        self._old, self._young = self._young, {}

    def leading(self, hashes: Sequence[bytes], alive: int) -> dict[int, int]:
        leading: dict[int, int] = {}
        length = 0
        young, old = self._young.get, self._old.get
        for position in marks(len(hashes)):
            mark = hashes[position]
            holders = (young(mark, 0) | old(mark, 0)) & alive
            if holders != alive:
                note_leading(leading, alive & ~holders, length)
                alive = holders
                if not alive:
                    break
            length = position + 1
        note_leading(leading, alive, length)
        return leading

    def forget(self, slot: int) -> None:
        rest = ~(1 << slot)
        for generation in (self._young, self._old):
            for mark in [mark for mark, holders in generation.items() if holders >> slot & 1]:
                generation[mark] &= rest


@lru_cache(maxsize=1024)
def marks(length: int) -> tuple[int, ...]:
    """Positions that stand for a chain: every 4th block, from the 64th on ever sparser, and the last.

    Of what two chains share, 3 blocks or an eighth are overlooked at most.
    """
    chosen: list[int] = []
    position = 3
    while position < length - 1:
        chosen.append(position)
        position += max(4, 1 << max(0, (position + 1).bit_length() - 4))
    return (*chosen, length - 1) if length else ()
