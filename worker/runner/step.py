"""A step that was started: what it will say, once it has run. Knows nothing of models or plans."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

from torch import Tensor

from decodefleet.kernels.ops import Logprobs

from ..protocol import TokenLogprobs
from ..sequence import Sequence
from .buffers import HostCopy
from .logprobs import read_logprobs


@dataclass(frozen=True)
class Sampled:
    token: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True)
class StepResult:
    """sampled: one per sequence that reached its end, siblings to be forked included.

    scored: log-probabilities of the prompt tokens that follow this step's, for those who asked.
    """

    sampled: list[tuple[Sequence, Sampled]] = field(default_factory=list)
    scored: list[tuple[Sequence, list[TokenLogprobs]]] = field(default_factory=list)


@dataclass(frozen=True)
class Reported:
    """Log-probabilities of sampled tokens: for which rows, and how many of the best each wants."""

    rows: list[int]
    tops: list[int]
    logprobs: Logprobs


@dataclass(frozen=True)
class Scored:
    """Log-probabilities of prompt tokens of one sequence."""

    seq: Sequence
    tokens: list[int]
    top: int
    logprobs: Logprobs


class PendingStep:
    """seqs: whom the step samples for. tokens_R: what it samples, on the device; row i is seqs[i]'s."""

    def __init__(
        self, seqs: list[Sequence], tokens_R: Tensor, reported: Reported | None, scored: Rows[Scored]
    ) -> None:
        self.tokens_R = tokens_R
        self.row_of = {seq: row for row, seq in enumerate(seqs)}
        self._seqs = seqs
        self._reported = reported
        self._scored = scored
        groups = [*([reported.logprobs] if reported else []), *(score.logprobs for score in scored)]
        self._copy = HostCopy([tokens_R, *(tensor for group in groups for tensor in group)])

    def result(self) -> StepResult:
        """Blocks until the step has run; the one place where the host waits for the device."""
        tokens_R, *rest = self._copy.wait()
        groups = [Logprobs(*rest[i : i + 4]) for i in range(0, len(rest), 4)]
        tokens: list[int] = tokens_R.tolist()
        entries: list[TokenLogprobs | None] = [None] * len(tokens)
        if self._reported is not None:
            rows, chosen = self._reported.rows, groups.pop(0)
            for row, entry in zip(
                rows,
                read_logprobs([tokens[row] for row in rows], chosen, self._reported.tops),
                strict=True,
            ):
                entries[row] = entry
        return StepResult(
            [
                (seq, Sampled(token, entry))
                for seq, token, entry in zip(self._seqs, tokens, entries, strict=True)
            ],
            [
                (score.seq, read_logprobs(score.tokens, group, [score.top] * len(score.tokens)))
                for score, group in zip(self._scored, groups, strict=True)
            ],
        )
