"""What was dispatched lately and the directory has not confirmed yet: the scheduler's own memory."""

from __future__ import annotations

from collections.abc import Iterable

from .block_holders import note_leading
from .chain import Chain


class RecentChains:
    """Chains dispatched lately, in two generations: an entry lives for one to two turns.

    Chains are closed towards the front, so that a few of their blocks stand for them: what holds the block at
    a mark holds all blocks before it.
    """

    def __init__(self, max_entries: int) -> None:
        self._young: dict[bytes, int] = {}
        self._old: dict[bytes, int] = {}
        self._dropped: list[dict[bytes, int]] = []
        self._max_entries = max_entries

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def add(self, slot: int, marks: Iterable[bytes]) -> None:
        bit, young = 1 << slot, self._young
        for mark in marks:
            young[mark] = young.get(mark, 0) | bit
        if len(young) > self._max_entries // 2:
            self.turn()

    def turn(self) -> None:
        if self._old:
            self._dropped.append(self._old)
        self._old, self._young = self._young, {}

    def sweep(self, budget: int) -> None:
        """Free up to `budget` entries of what was dropped: a million at once would hold up all placements."""
        while budget and self._dropped:
            dropped = self._dropped[-1]
            count = min(budget, len(dropped))
            for _ in range(count):
                dropped.popitem()
            budget -= count
            if not dropped:
                self._dropped.pop()

    def leading(self, chain: Chain, alive: int) -> dict[int, int]:
        """Leading blocks per slot of those in `alive` that hold any."""
        leading: dict[int, int] = {}
        length = 0
        young, old = self._young.get, self._old.get
        for mark, position in zip(chain.marks, chain.positions, strict=True):
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
