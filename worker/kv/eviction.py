"""Which cached block goes first when memory is needed: the policy behind `BlockPool`.

A policy keeps the blocks that nobody uses but that can still be found, in an order of its own. It is told
when a content is computed, when its block falls idle and when it is used again, and it names victims; it
learns from that alone. Knows nothing of reference counts, the hash index, sequences, tensors or tiers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Protocol

from ..config import EvictionPolicyName
from .hit_density import HitDensity


class EvictionPolicy(Protocol):
    """Iterating gives the idle blocks in any order; each method takes blocks in bulk, for speed."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]: ...

    def computed(self, block: int, name: bytes, depth: int) -> None:
        """A block in use got its content, which is named; depth: blocks before it in its chain."""
        ...

    def add(self, blocks: Sequence[int]) -> None:
        """Blocks fall idle at once. The later ones are worth more: a chain comes tail first, since a prefix
        without its beginning is of no use."""
        ...

    def reuse(self, blocks: Sequence[int]) -> None:
        """Idle blocks are used again."""
        ...

    def evict(self, count: int) -> list[int]:
        """Take out the `count` blocks that are worth least; there are that many."""
        ...

    def clear(self) -> list[int]:
        """Take out all."""
        ...


class Lru:
    """The block that has been idle longest goes first. Each operation is O(1) a block."""

    def __init__(self) -> None:
        self._idle: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._idle)

    def __iter__(self) -> Iterator[int]:
        return iter(self._idle)

    def computed(self, block: int, name: bytes, depth: int) -> None:
        """Contents are all the same to it."""

    def add(self, blocks: Sequence[int]) -> None:
        idle = self._idle
        for block in blocks:
            idle[block] = None

    def reuse(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            del self._idle[block]

    def evict(self, count: int) -> list[int]:
        victims = list(islice(self._idle, count))
        self.reuse(victims)
        return victims

    def clear(self) -> list[int]:
        blocks = list(self._idle)
        self._idle.clear()
        return blocks


def make_policy(name: EvictionPolicyName, total: int, doubling: float) -> EvictionPolicy:
    """total: blocks of the pool; doubling: see `HitDensity`."""
    return HitDensity(total, doubling) if name == "cost" else Lru()
