"""Which tokens a sequence with penalties has seen, counted on the device.

The newest token may not have reached the host when the next one is sampled, so each sampled token is counted
where it is made. A sequence keeps its counts through preemption: its tokens do not change.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from ..sequence import Sequence, State
from .buffers import send


class TokenCounts:
    """One row per sequence, of memory that grows with the number of such sequences alive.

    seen_SV: bool, tokens of prompt or output; counts_SV: int32, how often in the output.
    """

    def __init__(self, vocab: int, device: torch.device) -> None:
        self.seen_SV = torch.zeros((0, vocab), dtype=torch.bool, device=device)
        self.counts_SV = torch.zeros((0, vocab), dtype=torch.int32, device=device)
        self._row_of: dict[Sequence, int] = {}
        self._free: list[int] = []

    def rows(self, pairs: Rows[tuple[Sequence, Sequence]]) -> list[int]:
        """The row of the first of each pair; one seen first starts with the known tokens of the second."""
        return [self._row_of[seq] if seq in self._row_of else self._start(seq, known) for seq, known in pairs]

    def add(self, rows_R: Tensor, tokens_R: Tensor) -> None:
        """Count one token for each of these rows; no row is there twice."""
        self.seen_SV[rows_R, tokens_R] = True
        self.counts_SV[rows_R, tokens_R] += 1

    def _start(self, seq: Sequence, source: Sequence) -> int:
        assert not source.pending, "tokens in flight are known to those only who counted from the beginning"
        if not self._free:
            self._make_room()
        row = self._free.pop()
        self._row_of[seq] = row
        tokens, vocab = torch.tensor(source.tokens), self.seen_SV.shape[1]
        seen_V = tokens.bincount(minlength=vocab) > 0
        counts_V = tokens[source.prompt_len :].bincount(minlength=vocab).int()
        self.seen_SV[row] = send(seen_V, self.seen_SV.device)
        self.counts_SV[row] = send(counts_V, self.counts_SV.device)
        return row

    def _make_room(self) -> None:
        for seq in [seq for seq in self._row_of if seq.state is State.FINISHED]:
            self._free.append(self._row_of.pop(seq))
        if not self._free:
            rows = self.seen_SV.shape[0]
            more = max(rows, 4)
            self.seen_SV, self.counts_SV = (
                torch.cat((old, old.new_zeros(more, old.shape[1]))) for old in (self.seen_SV, self.counts_SV)
            )
            self._free += range(rows, rows + more)
