"""From logits to tokens, as each row's parameters ask, without waiting for the device.

Log-probabilities are those of the model's own distribution, before bias, penalties, temperature and filters.
A token depends on its row alone: (logits, parameters, known tokens, seed, position).
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decodefleet.kernels import ops

from ..batcher import Chunk
from ..sampling_params import SamplingParams
from ..sequence import Sequence
from .buffers import Array
from .logprobs import logprobs_of
from .step import Reported
from .token_counts import TokenCounts


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

SEED_MASK = (1 << 64) - 1


class SampleFields(NamedTuple, Generic[T]):
    """A step's sampling, made in arrays on the host and read as tensors on the device.

    R rows are sampled, with the parameters of `ops.sample`; P of them penalised, Q with log-probabilities.
    S rows of hidden states want logits, and `logits_R` picks each row's among these. X biases, Y bans.
    """

    hidden_S: T
    logits_R: T
    temperature_R: T
    top_k_R: T
    top_p_R: T
    min_p_R: T
    seed_R: T
    position_R: T
    penalised_P: T
    counts_P: T
    repetition_P: T
    presence_P: T
    frequency_P: T
    bias_row_X: T
    bias_token_X: T
    bias_X: T
    ban_row_Y: T
    ban_token_Y: T
    reported_Q: T


class Sampler:
    def __init__(self, vocab: int, device: torch.device) -> None:
        self._counts = TokenCounts(vocab, device)

    def lay_out(self, chunks: Rows[Chunk], rows: Rows[SampleRow]) -> SampleFields[Array]:
        """rows: those of `sample_rows(chunks)`."""
        ends = np.cumsum([chunk.count for chunk in chunks]).tolist()
        hidden = [end - 1 for chunk, end in zip(chunks, ends, strict=True) if chunk.samples]
        logits_row = {chunk.seq: i for i, chunk in enumerate(chunk for chunk in chunks if chunk.samples)}
        params = [row.params for row in rows]
        penalised = [i for i, own in enumerate(params) if own.has_penalties]
        penalties = [params[i] for i in penalised]
        biases = [(i, *pair) for i, own in enumerate(params) for pair in own.logit_bias.items()]
        bans = [(i, token) for i, row in enumerate(rows) for token in row.banned]
        return SampleFields(
            hidden_S=_ints(hidden),
            logits_R=_ints(logits_row[row.source] for row in rows),
            temperature_R=_floats(own.temperature for own in params),
            top_k_R=_ints(own.top_k for own in params),
            top_p_R=_floats(own.top_p for own in params),
            min_p_R=_floats(own.min_p for own in params),
            seed_R=np.array([row.seq.seed & SEED_MASK for row in rows], dtype=np.uint64).view(np.int64),
            position_R=_ints(row.source.length for row in rows),
            penalised_P=_ints(penalised),
            counts_P=_ints(self._counts.rows([(rows[i].seq, rows[i].source) for i in penalised])),
            repetition_P=_floats(own.repetition_penalty for own in penalties),
            presence_P=_floats(own.presence_penalty for own in penalties),
            frequency_P=_floats(own.frequency_penalty for own in penalties),
            bias_row_X=_ints(row for row, _, _ in biases),
            bias_token_X=_ints(token for _, token, _ in biases),
            bias_X=_floats(bias for _, _, bias in biases),
            ban_row_Y=_ints(row for row, _ in bans),
            ban_token_Y=_ints(token for _, token in bans),
            reported_Q=_ints(i for i, own in enumerate(params) if own.logprobs is not None),
        )

    def sample(
        self, logits_SV: Tensor, rows: Rows[SampleRow], t: SampleFields[Tensor]
    ) -> tuple[Tensor, Reported | None]:
        """Tokens [R]; logits_SV: fp32 [S, vocabulary], left as they are."""
        logits_RV = logits_SV[t.logits_R] if len(rows) > logits_SV.shape[0] else logits_SV
        tokens_R = ops.sample(
            self._adjust(logits_RV, t),
            *(t.temperature_R, t.top_k_R, t.top_p_R, t.min_p_R, t.seed_R, t.position_R),
        )
        if t.penalised_P.numel():
            self._counts.add(t.counts_P, tokens_R[t.penalised_P])
        return tokens_R, _report(logits_RV, tokens_R, rows, t.reported_Q)

    def _adjust(self, logits_RV: Tensor, t: SampleFields[Tensor]) -> Tensor:
        """Penalties, bias and bans; a copy only where a row asks for any."""
        if not (t.penalised_P.numel() or t.bias_row_X.numel() or t.ban_row_Y.numel()):
            return logits_RV
        logits_RV = logits_RV.clone()
        if t.penalised_P.numel():
            logits_RV[t.penalised_P] = ops.apply_penalties(
                logits_RV[t.penalised_P],
                self._counts.seen_SV[t.counts_P],
                self._counts.counts_SV[t.counts_P],
                t.repetition_P.unsqueeze(1),
                t.presence_P.unsqueeze(1),
                t.frequency_P.unsqueeze(1),
            )
        logits_RV[t.bias_row_X, t.bias_token_X] += t.bias_X
        logits_RV[t.ban_row_Y, t.ban_token_Y] = float("-inf")
        return logits_RV


def sample_rows(chunks: Rows[Chunk]) -> list[SampleRow]:
    """Who gets a token from these chunks: sequences that reach their end, and siblings that begin there."""
    return [
        SampleRow(seq, chunk.seq, seq.request.banned_tokens(seq.output_tokens))
        for chunk in chunks
        if chunk.samples
        for seq in (chunk.seq, *chunk.seq.request.unborn)
    ]


def _report(
    logits_RV: Tensor, tokens_R: Tensor, rows: Rows[SampleRow], reported_Q: Tensor
) -> Reported | None:
    if not reported_Q.numel():
        return None
    wanted = {i: row.params.logprobs for i, row in enumerate(rows) if row.params.logprobs is not None}
    tops = list(wanted.values())
    tensors = logprobs_of(logits_RV[reported_Q], tokens_R[reported_Q], max(tops))
    return Reported(list(wanted), tops, tensors)


def _ints(values: Iterable[int]) -> NDArray[np.int64]:
    return np.array(list(values), dtype=np.int64)


def _floats(values: Iterable[float]) -> NDArray[np.float32]:
    return np.array(list(values), dtype=np.float32)
