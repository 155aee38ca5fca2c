"""From logits to tokens, as each row's parameters ask.

Log-probabilities are those of the model's own distribution, before bias, penalties, temperature and filters.
A token depends on its row alone: (logits, parameters, known tokens, seed, position).
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch
from torch import Tensor

from decodefleet.kernels import ops

from ..protocol import TokenLogprobs
from ..sampling_params import SamplingParams
from ..sequence import Sequence


@dataclass(frozen=True)
class SampleRow:
    """One token to be sampled for `seq`, at position len(tokens) of `source`'s tokens.

    source differs from seq for siblings whose first token comes from the logits of the prompt they share.
    """

    seq: Sequence
    source: Sequence
    banned: tuple[int, ...] = ()

    @property
    def params(self) -> SamplingParams:
        return self.seq.request.params

    @property
    def position(self) -> int:
        return len(self.source.tokens)


@dataclass(frozen=True)
class Sampled:
    token: int
    logprobs: TokenLogprobs | None


def sample(logits_RV: Tensor, rows: Rows[SampleRow]) -> list[Sampled]:
    """logits_RV: fp32 [rows, vocabulary], left as it is."""
    adjusted_RV = _adjust(logits_RV, rows)
    tokens = _choose(adjusted_RV, rows)
    return [
        Sampled(token, None if k is None else token_logprobs(logits_V, token, k))
        for token, logits_V, k in zip(tokens, logits_RV, (row.params.logprobs for row in rows), strict=True)
    ]


def token_logprobs(logits_V: Tensor, token: int, top: int) -> TokenLogprobs:
    """Log-probability and rank of one token under one row of logits, and the `top` best."""
    logprobs_V = logits_V.log_softmax(-1)
    own = logprobs_V[token]
    best = logprobs_V.topk(top)
    return TokenLogprobs(
        token=token,
        logprob=float(own),
        rank=int((logprobs_V > own).sum()) + 1,
        top_tokens=tuple(best.indices.tolist()),
        top_logprobs=tuple(best.values.tolist()),
    )


def _adjust(logits_RV: Tensor, rows: Rows[SampleRow]) -> Tensor:
    """Bias, bans and penalties; a copy only where a row asks for any."""
    touched = [i for i, row in enumerate(rows) if row.params.logit_bias or row.banned]
    penalised = [i for i, row in enumerate(rows) if row.params.has_penalties]
    if not touched and not penalised:
        return logits_RV
    logits_RV = logits_RV.clone()
    if penalised:
        logits_RV[penalised] = _penalise(logits_RV[penalised], [rows[i] for i in penalised])
    for i in touched:
        for token, bias in rows[i].params.logit_bias.items():
            logits_RV[i, token] += bias
        logits_RV[i, list(rows[i].banned)] = float("-inf")
    return logits_RV


def _penalise(logits_RV: Tensor, rows: Rows[SampleRow]) -> Tensor:
    V, device = logits_RV.shape[1], logits_RV.device
    known = [torch.tensor(row.source.tokens, device=device) for row in rows]
    seen_RV = torch.stack([tokens.bincount(minlength=V) > 0 for tokens in known])
    counts_RV = torch.stack(
        [
            tokens[row.source.prompt_len :].bincount(minlength=V)
            for tokens, row in zip(known, rows, strict=True)
        ]
    )
    params = [row.params for row in rows]

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, device=device).unsqueeze(1)

    return ops.apply_penalties(
        logits_RV,
        seen_RV,
        counts_RV,
        column([p.repetition_penalty for p in params]),
        column([p.presence_penalty for p in params]),
        column([p.frequency_penalty for p in params]),
    )


def _choose(logits_RV: Tensor, rows: Rows[SampleRow]) -> list[int]:
    random = [i for i, row in enumerate(rows) if not row.params.greedy]
    if random:
        noisy_RV = _perturb(logits_RV[random], [rows[i] for i in random])
        if len(random) < len(rows):
            logits_RV = logits_RV.clone()
            logits_RV[random] = noisy_RV
        else:
            logits_RV = noisy_RV
    tokens: list[int] = logits_RV.argmax(-1).tolist()
    return tokens


def _perturb(logits_RV: Tensor, rows: Rows[SampleRow]) -> Tensor:
    """Tempered, filtered, and with the Gumbel noise of (seed, position, token)."""
    params = [row.params for row in rows]
    temperature = torch.tensor([p.temperature for p in params], device=logits_RV.device).unsqueeze(1)
    logits_RV = ops.filter_logits(
        logits_RV / temperature,
        [p.top_k for p in params],
        [p.top_p for p in params],
        [p.min_p for p in params],
    )
    seeds = [row.seq.seed for row in rows]
    positions = [row.position for row in rows]
    return logits_RV + ops.gumbel_noise(seeds, positions, logits_RV.shape[1], logits_RV.device)
