"""The tokens of sequences with penalties, kept on the device.

The newest token may not have reached the host when the next one is sampled, so each sampled token is noted
where it is made. A sequence keeps its row through preemption: its tokens do not change.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import torch

from ..sequence import Sequence, State
from .buffers import send

FEWEST_TOKENS = 1024


class TokenHistory:
    """tokens_SL: int32 [rows, length]; grows with such sequences alive, and the longest of them."""

    def __init__(self, device: torch.device) -> None:
        self.tokens_SL = torch.zeros((0, FEWEST_TOKENS), dtype=torch.int32, device=device)
        self._row_of: dict[Sequence, int] = {}
        self._free: list[int] = []

    def rows(self, pairs: Rows[tuple[Sequence, Sequence]]) -> list[int]:
        """The row of the first of each pair; one seen first starts with the known tokens of the second."""
        # and one more, which the next sample is
        self._make_long(max(known.length for _, known in pairs) + 1)
        return [self._row_of[seq] if seq in self._row_of else self._start(seq, known) for seq, known in pairs]

    def _start(self, seq: Sequence, source: Sequence) -> int:
        assert not source.pending, "who has a row from its first sampled token on misses none"
        if not self._free:
            self._make_room()
        row = self._free.pop()
        self._row_of[seq] = row
        tokens = torch.tensor(source.tokens, dtype=torch.int32)
        self.tokens_SL[row, : len(tokens)] = send(tokens, self.tokens_SL.device)
        return row

    def _make_long(self, tokens: int) -> None:
        rows, length = self.tokens_SL.shape
        if tokens > length:
            more = self.tokens_SL.new_zeros(rows, max(tokens, 2 * length) - length)
            self.tokens_SL = torch.cat((self.tokens_SL, more), dim=1)

    def _make_room(self) -> None:
        for seq in [seq for seq in self._row_of if seq.state is State.FINISHED]:
            self._free.append(self._row_of.pop(seq))
        if not self._free:
            rows, length = self.tokens_SL.shape
            more = max(rows, 4)
            self.tokens_SL = torch.cat((self.tokens_SL, self.tokens_SL.new_zeros(more, length)))
            self._free += range(rows, rows + more)
