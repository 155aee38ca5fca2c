"""The hashes of a prompt's blocks as they come in a request: joined, and taken apart no further than is read.

A prompt of a thousand blocks whose prefix nobody holds costs a few microseconds that way.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise

from decodefleet.worker.kv.hashing import HASH_BYTES

# longer chains are marked no more densely towards their ends
_LONGEST = 1 << 20


def _marked() -> list[int]:
    """Every 4th block, from the 64th on ever sparser: of what two chains share, 3 blocks or an eighth are
    overlooked at most."""
    chosen, position = [], 3
    while position < _LONGEST:
        chosen.append(position)
        position += max(4, 1 << max(0, (position + 1).bit_length() - 4))
    return chosen


_MARKED = _marked()


class Chain:
    """Hashes of full blocks, first to last. A broken tail is ignored.

    marks: of few blocks that stand for the whole, at `positions`, the last block's among them.
    """

    __slots__ = ("_packed", "length", "marks", "positions")

    def __init__(self, packed: bytes) -> None:
        self._packed = packed
        self.length = len(packed) // HASH_BYTES
        self.positions, layout = _layout(self.length)
        self.marks: tuple[bytes, ...] = layout.unpack_from(packed)

    @classmethod
    def of(cls, hashes: Iterable[bytes]) -> Chain:
        return cls(b"".join(hashes))

    def part(self, start: int, count: int) -> tuple[bytes, ...]:
        """Up to `count` hashes from `start` on."""
        count = min(count, self.length - start)
        return struct.unpack_from(f"{HASH_BYTES}s" * count, self._packed, HASH_BYTES * start)

    def block(self, at: int) -> bytes:
        return self._packed[HASH_BYTES * at : HASH_BYTES * (at + 1)]


@lru_cache(maxsize=4096)
def _layout(length: int) -> tuple[tuple[int, ...], struct.Struct]:
    """Which blocks are marks, and how to take all of them out at once."""
    positions = (*_MARKED[: bisect_left(_MARKED, length - 1)], length - 1) if length else ()
    gaps = (at - before - 1 for before, at in pairwise((-1, *positions)))
    return positions, struct.Struct("".join(f"{HASH_BYTES * gap}x{HASH_BYTES}s" for gap in gaps))
