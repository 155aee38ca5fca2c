"""Log-probabilities in Triton: sum and rank in one pass over a row, the best by torch.topk.

Formula and shapes: see `reference.py`. fp32; tolerance 1e-5; a row sees nothing but itself.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import launch
from .reference import Logprobs

BLOCK = 4096


@triton.jit
def _logprobs_kernel(
    logits_ptr, tokens_ptr, logprob_ptr, rank_ptr, total_ptr, V, row_stride, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    own = tl.load(row_ptr + tl.load(tokens_ptr + row))
    # a stand-in for -inf that can be subtracted from itself
    largest = tl.full((), -3.0e38, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    rank = tl.full((), 1, tl.int32)
    for start in range(0, V, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + columns, mask=columns < V, other=float("-inf"))
        rank += tl.sum((x > own).to(tl.int32))
        higher = tl.maximum(largest, tl.max(x))
        total = total * tl.exp(largest - higher) + tl.sum(tl.exp(x - higher))
        largest = higher
    total = largest + tl.log(total)
    tl.store(logprob_ptr + row, own - total)
    tl.store(rank_ptr + row, rank.to(tl.int64))
    tl.store(total_ptr + row, total)


def token_logprobs_triton(logits_RV: Tensor, tokens_R: Tensor, top: int) -> Logprobs:
    """As the reference; rows may lie apart. Can be captured in a graph."""
    R, V = logits_RV.shape
    logprob_R, total_R = torch.empty((2, R), device=logits_RV.device).unbind()
    rank_R = torch.empty(R, dtype=torch.int64, device=logits_RV.device)
    launch(
        _logprobs_kernel,
        (R,),
        *(logits_RV, tokens_R, logprob_R, rank_R, total_R, V, logits_RV.stride(0)),
        BLOCK=BLOCK,
        num_warps=8,
    )
    best = logits_RV.topk(top)
    return Logprobs(logprob_R, rank_R, best.indices, best.values - total_R[:, None])


def _example() -> None:
    tokens_R = torch.empty(8, dtype=torch.int64, device="meta")
    token_logprobs_triton(torch.empty((8, 128256), device="meta"), tokens_R, 5)


VARIANTS: dict[str, Callable[[], None]] = {"128256": _example}
