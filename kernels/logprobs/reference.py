"""Log-probabilities of chosen tokens, their ranks, and the likeliest tokens.

Formula: x - log Σ exp(x) over the vocabulary.
Shapes: logits_RV fp32 [rows, vocabulary], tokens_R int64 [rows].
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Logprobs(NamedTuple):
    """logprob_R fp32 and rank_R int64 (1 is the likeliest) of the tokens; the best [rows, top], in order."""

    logprob_R: Tensor
    rank_R: Tensor
    top_tokens_RK: Tensor
    top_logprobs_RK: Tensor


def token_logprobs(logits_RV: Tensor, tokens_R: Tensor, top: int) -> Logprobs:
    """top: how many of the best, 0 for none."""
    own_R1 = logits_RV.gather(1, tokens_R[:, None])
    total_R1 = logits_RV.logsumexp(-1, keepdim=True)
    best = logits_RV.topk(top)
    rank_R = (logits_RV > own_R1).sum(-1) + 1
    return Logprobs((own_R1 - total_R1)[:, 0], rank_R, best.indices, best.values - total_R1)
