"""Log-probabilities that were computed where the logits are, put into words once they are on the host."""

from __future__ import annotations

import torch

from decodefleet.kernels.ops import Logprobs

from ..protocol import TokenLogprobs


def concatenate(parts: list[Logprobs]) -> Logprobs:
    return Logprobs(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def read_logprobs(tokens: list[int], logprobs: Logprobs, tops: list[int]) -> list[TokenLogprobs]:
    """tokens: one per row; tops: how many of the best to tell for each, at most as many as there are."""
    columns = [tensor.tolist() for tensor in logprobs]
    return [
        TokenLogprobs(
            token=token,
            logprob=own,
            rank=rank,
            top_tokens=tuple(ids[:top]),
            top_logprobs=tuple(values[:top]),
        )
        for token, top, own, rank, ids, values in zip(tokens, tops, *columns, strict=True)
    ]
