"""From logits to tokens, as each row's parameters ask, without waiting for the device.

Log-probabilities are those of the model's own distribution, before bias, penalties, temperature and filters.
A token depends on its row alone: (logits, parameters, known tokens, seed, position).
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from decodefleet.kernels import ops

from ..batcher import Chunk
from ..sampling_params import SamplingParams
from ..sequence import Sequence
from .buffers import Array
from .step import Reported
from .token_history import TokenHistory


@dataclass(frozen=True)
class SampleRow:
    """One token to be sampled for `seq`, behind the tokens of `source`.

    source differs from seq for siblings whose first token comes from the logits of the prompt they share.
    """

    seq: Sequence
    source: Sequence
    banned: tuple[int, ...] = ()

    @property
    def params(self) -> SamplingParams:
        return self.seq.request.params


T = TypeVar("T")

# seeds are 64 bits; on the device they have a sign
SIGN = 1 << 63


class SampleFields(NamedTuple, Generic[T]):
    """A step's sampling, made in arrays on the host, read as tensors on the device; empty where not needed.

    logits_R: which of the rows of logits each row draws from; empty where each has its own.
    ints_3R: top_k, seed, position; floats_3R: temperature, top_p, min_p; empty where all rows are greedy.
    penalised_4P: row, row of the history, tokens of the prompt, tokens known; penalties_3P: repetition,
        presence, frequency.
    biased_2X: row, token; bias_X: how much. banned_2Y: row, token. reported_Q: rows with log-probabilities.
    """

    logits_R: T
    ints_3R: T
    floats_3R: T
    penalised_4P: T
    penalties_3P: T
    biased_2X: T
    bias_X: T
    banned_2Y: T
    reported_Q: T


class Sampler:
    def __init__(self, device: torch.device) -> None:
        self._history = TokenHistory(device)

    def lay_out(self, chunks: Rows[Chunk], rows: Rows[SampleRow]) -> SampleFields[Array]:
        """rows: those of `sample_rows(chunks)`."""
        params = [row.params for row in rows]
        penalised = [i for i, own in enumerate(params) if own.has_penalties]
        biases = [(i, *pair) for i, own in enumerate(params) for pair in own.logit_bias.items()]
        bans = [(i, token) for i, row in enumerate(rows) for token in row.banned]
        reported = [i for i, own in enumerate(params) if own.logprobs is not None]
        ints, floats = _draws(rows) if any(own.temperature for own in params) else _NOTHING
        history, penalties = self._penalties(rows, penalised) if penalised else _NOTHING
        return SampleFields(
            logits_R=_sources(chunks, rows),
            ints_3R=ints,
            floats_3R=floats,
            penalised_4P=history,
            penalties_3P=penalties,
            biased_2X=_pairs([(row, token) for row, token, _ in biases]),
            bias_X=_floats([bias for _, _, bias in biases]),
            banned_2Y=_pairs(bans),
            reported_Q=_ints(reported),
        )

    def sample(
        self, logits_SV: Tensor, rows: Rows[SampleRow], t: SampleFields[Tensor]
    ) -> tuple[Tensor, Reported | None]:
        """Tokens [R]; logits_SV: fp32 [S, vocabulary], left as they are."""
        logits_RV = logits_SV[t.logits_R] if t.logits_R.numel() else logits_SV
        tokens_R = _draw(self._adjust(logits_RV, rows, t), t)
        if t.penalised_4P.numel():
            row_P, history_P, _, known_P = t.penalised_4P.unbind()
            self._history.tokens_SL[history_P, known_P] = tokens_R[row_P].int()
        return tokens_R, _report(logits_RV, tokens_R, rows, t.reported_Q)

    def _penalties(self, rows: Rows[SampleRow], penalised: list[int]) -> tuple[Array, Array]:
        """penalised_4P and penalties_3P."""
        mine = [rows[i] for i in penalised]
        history = self._history.rows([(row.seq, row.source) for row in mine])
        lengths = [[row.source.prompt_len for row in mine], [row.source.length for row in mine]]
        penalties = [
            (own.repetition_penalty, own.presence_penalty, own.frequency_penalty)
            for own in (row.params for row in mine)
        ]
        return _ints([penalised, history, *lengths]), _floats(penalties).T.copy()

    def _adjust(self, logits_RV: Tensor, rows: Rows[SampleRow], t: SampleFields[Tensor]) -> Tensor:
        """Penalties, bias and bans; a copy only where a row asks for any."""
        if not (t.penalised_4P.numel() or t.bias_X.numel() or t.banned_2Y.numel()):
            return logits_RV
        logits_RV = logits_RV.clone()
        if t.penalised_4P.numel():
            row_P, history_P, prompt_P, known_P = t.penalised_4P.unbind()
            longest = max(row.source.length for row in rows if row.params.has_penalties)
            tokens_PL = self._history.tokens_SL[history_P, :longest]
            logits_RV[row_P] = ops.penalise(
                logits_RV[row_P], tokens_PL, prompt_P, known_P, *t.penalties_3P.unbind()
            )
        biased_row_X, biased_X = t.biased_2X.unbind()
        logits_RV[biased_row_X, biased_X] += t.bias_X
        banned_row_Y, banned_Y = t.banned_2Y.unbind()
        logits_RV[banned_row_Y, banned_Y] = float("-inf")
        return logits_RV


def sample_rows(chunks: Rows[Chunk]) -> list[SampleRow]:
    """Who gets a token from these chunks: sequences that reach their end, and siblings that begin there."""
    return [
        SampleRow(seq, chunk.seq, seq.banned_tokens)
        for chunk in chunks
        if chunk.samples
        for seq in (chunk.seq, *chunk.seq.request.unborn)
    ]


def sampled_rows(chunks: Rows[Chunk]) -> Array:
    """Which of all chunks' tokens are sampled from: the last of each that reaches its end; empty for all."""
    if all(chunk.samples and chunk.count == 1 for chunk in chunks):
        return _NO_INTS
    ends = accumulate(chunk.count for chunk in chunks)
    return _ints([end - 1 for chunk, end in zip(chunks, ends, strict=True) if chunk.samples])


def _sources(chunks: Rows[Chunk], rows: Rows[SampleRow]) -> Array:
    """logits_R."""
    sampling = [chunk.seq for chunk in chunks if chunk.samples]
    if len(rows) == len(sampling):
        return _NO_INTS
    row_of = {seq: i for i, seq in enumerate(sampling)}
    return _ints([row_of[row.source] for row in rows])


def _draws(rows: Rows[SampleRow]) -> tuple[Array, Array]:
    """ints_3R and floats_3R."""
    params = [row.params for row in rows]
    seeds = [row.seq.seed if row.seq.seed < SIGN else row.seq.seed - 2 * SIGN for row in rows]
    ints = _ints([[own.top_k for own in params], seeds, [row.source.length for row in rows]])
    return ints, _floats([(own.temperature, own.top_p, own.min_p) for own in params]).T.copy()


def _draw(logits_RV: Tensor, t: SampleFields[Tensor]) -> Tensor:
    if not t.ints_3R.numel():
        return ops.argmax(logits_RV)
    top_k_R, seed_R, position_R = t.ints_3R.unbind()
    temperature_R, top_p_R, min_p_R = t.floats_3R.unbind()
    return ops.sample(logits_RV, temperature_R, top_k_R, top_p_R, min_p_R, seed_R, position_R)


def _report(
    logits_RV: Tensor, tokens_R: Tensor, rows: Rows[SampleRow], reported_Q: Tensor
) -> Reported | None:
    if not reported_Q.numel():
        return None
    wanted = {i: row.params.logprobs for i, row in enumerate(rows) if row.params.logprobs is not None}
    tops = list(wanted.values())
    logprobs = ops.token_logprobs(logits_RV[reported_Q], tokens_R[reported_Q], max(tops))
    return Reported(list(wanted), tops, logprobs)


def _ints(values: Rows[int] | Rows[list[int]]) -> Array:
    return np.array(values, dtype=np.int64) if values else _NO_INTS


def _floats(values: Rows[float] | Rows[tuple[float, ...]]) -> Array:
    return np.array(values, dtype=np.float32) if values else _NO_FLOATS


def _pairs(values: list[tuple[int, int]]) -> Array:
    """int64 [2, pairs]."""
    return np.array(values, dtype=np.int64).T.copy() if values else _NO_PAIRS


_NO_INTS, _NO_PAIRS = np.zeros(0, dtype=np.int64), np.zeros((2, 0), dtype=np.int64)
_NO_FLOATS = np.zeros(0, dtype=np.float32)
_NOTHING = (_NO_INTS, _NO_FLOATS)
