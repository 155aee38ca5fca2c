"""Block ids of running sequences as rows of one array, kept between steps: a step writes only what is new.

At 256 sequences of 4,096 tokens a table made anew from lists costs milliseconds of every step. Host memory
only.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
from numpy.typing import NDArray

from ..batcher import Chunk
from ..kv.groups import PLAIN, KvGroups
from ..sequence import Sequence, State

# the list that a row was written from, and its last part
Written = tuple[list[int] | None, int, list[int]]
NOTHING: Written = (None, 0, [])


class BlockTables:
    """A table per KV group. rows: sequences that run at once; widths: most blocks in a row of each table."""

    def __init__(self, rows: int, widths: Rows[int], block_size: int, groups: KvGroups = PLAIN) -> None:
        self.groups = groups
        self._block_size = block_size
        # entries behind a sequence's own are stale or 0, and those that slid out of a window may be stale:
        # valid ids, which is all that is asked of what nobody sees
        self._tables = [np.zeros((rows, width), dtype=np.int32) for width in widths]
        self._row_of: dict[Sequence, int] = {}
        self._written = [[NOTHING] * rows for _ in self._tables]
        self._free = list(range(rows))

    def gather(self, chunks: tuple[Chunk, ...], widths: Rows[int]) -> tuple[NDArray[np.int32], ...]:
        """Of each group, int32 [chunks, width]: the blocks of each chunk's sequence, as far as it reaches.

        widths: in blocks, of each frame.
        """
        rows = [self._row(chunk.seq) for chunk in chunks]
        gathered = []
        for group, (table, frame) in enumerate(zip(self._tables, self.groups.frames, strict=True)):
            self._update(group, chunks, rows)
            gathered.append(table[:, : widths[frame]].take(rows, axis=0))
        return tuple(gathered)

    def _update(self, group: int, chunks: tuple[Chunk, ...], rows: list[int]) -> None:
        table, written = self._tables[group], self._written[group]
        for chunk, row in zip(chunks, rows, strict=True):
            own = chunk.seq.blocks[group]
            # a sequence that lost its blocks gets another list; in the same one, only blocks that are
            # written can have been added or exchanged
            blocks = own.ids
            known, first_known, tail_known = written[row]
            first = chunk.start // self._block_size - own.dropped if known is blocks else 0
            tail = blocks[first:]
            if known is not blocks or first != first_known or tail != tail_known:
                table[row, first : len(blocks)] = tail
                written[row] = (blocks, first, tail)

    def _row(self, seq: Sequence) -> int:
        row = self._row_of.get(seq)
        return self._take_row(seq) if row is None else row

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
