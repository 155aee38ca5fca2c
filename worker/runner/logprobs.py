"""Log-probabilities of given tokens under given logits, computed where the logits are and read later."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..protocol import TokenLogprobs


class LogprobTensors(NamedTuple):
    """own_R, rank_R (1 is the best): of each row's token; ids_RK, values_RK: of the row's K best."""

    own_R: Tensor
    rank_R: Tensor
    ids_RK: Tensor
    values_RK: Tensor


def logprobs_of(logits_RV: Tensor, tokens_R: Tensor, top: int) -> LogprobTensors:
    """logits_RV: fp32 [rows, vocabulary]; top: K."""
    logprobs_RV = logits_RV.log_softmax(-1)
    own_R1 = logprobs_RV.gather(1, tokens_R.unsqueeze(1))
    rank_R = (logprobs_RV > own_R1).sum(-1) + 1
    values_RK, ids_RK = logprobs_RV.topk(top)
    return LogprobTensors(own_R1.squeeze(1), rank_R, ids_RK, values_RK)


def concatenate(parts: list[LogprobTensors]) -> LogprobTensors:
    return LogprobTensors(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def read_logprobs(tokens: list[int], tensors: LogprobTensors, tops: list[int]) -> list[TokenLogprobs]:
    """tensors: on the host; tops: how many of the best to report for each row, at most K."""
    own_R, rank_R, ids_RK, values_RK = (tensor.tolist() for tensor in tensors)
    return [
        TokenLogprobs(
            token=token,
            logprob=own,
            rank=rank,
            top_tokens=tuple(ids[:top]),
            top_logprobs=tuple(values[:top]),
        )
        for token, own, rank, ids, values, top in zip(
            tokens, own_R, rank_R, ids_RK, values_RK, tops, strict=True
        )
    ]
