"""Block ids of running sequences as rows of one array, kept between steps: a step writes only what is new.

At 256 sequences of 4,096 tokens a table made anew from lists costs milliseconds of every step. Host memory
only.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..batcher import Chunk
from ..sequence import Sequence, State

# the list that a row was written from, and its last part
Written = tuple[list[int] | None, int, list[int]]
NOTHING: Written = (None, 0, [])


class BlockTables:
    """A table per KV group. rows: sequences that run at once; width: blocks of the longest."""

    def __init__(self, rows: int, width: int, block_size: int, groups: int = 1) -> None:
        self.groups = groups
        self._block_size = block_size
        # entries behind a sequence's own are stale or 0, and those that slid out of a window may be stale:
        # valid ids, which is all that is asked of what nobody sees
        self._tables: NDArray[np.int32] = np.zeros((groups, rows, width), dtype=np.int32)
        self._views = [*self._tables]
        self._row_of: dict[Sequence, int] = {}
        self._written = [[NOTHING] * rows for _ in range(groups)]
        self._free = list(range(rows))

    def gather(self, chunks: tuple[Chunk, ...], width: int) -> NDArray[np.int32]:
        """int32 [groups, chunks, width]: the blocks of each chunk's sequence, as far as the chunk reaches."""
        rows = [self._update(chunk) for chunk in chunks]
        return self._tables[:, :, :width].take(rows, axis=1)

    def _update(self, chunk: Chunk) -> int:
        seq = chunk.seq
        row = self._row_of.get(seq)
        if row is None:
            row = self._take_row(seq)
        start = chunk.start // self._block_size
        for table, written, own in zip(self._views, self._written, seq.blocks, strict=True):
            # a sequence that lost its blocks gets another list; in the same one, only blocks that are
            # written can have been added or exchanged
            blocks = own.ids
            known, first_known, tail_known = written[row]
            first = start if known is blocks else 0
            tail = blocks[first:]
            if known is not blocks or first != first_known or tail != tail_known:
                table[row, first : len(blocks)] = tail
                written[row] = (blocks, first, tail)
        return row

    def _take_row(self, seq: Sequence) -> int:
        if not self._free:
            for held in [held for held in self._row_of if held.state is not State.RUNNING]:
                row = self._row_of.pop(held)
                for written in self._written:
                    written[row] = NOTHING
                self._free.append(row)
        row = self._free.pop()
        self._row_of[seq] = row
        return row
