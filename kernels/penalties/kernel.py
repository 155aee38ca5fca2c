"""Penalties in Triton: one launch counts a row's tokens, one changes its logits. Formula: see `reference.py`.

A count and whether the prompt has the token share one word per row and token of the vocabulary. Integer sums,
and one rounding per operation as in the reference: equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import launch

BLOCK = 1024
IN_PROMPT = tl.constexpr(1 << 30)


@triton.jit(
    do_not_specialize=["length"], do_not_specialize_on_alignment=["tokens_ptr", "prompt_ptr", "known_ptr"]
)
def _count_kernel(tokens_ptr, prompt_ptr, known_ptr, counts_ptr, length, V, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    known = place < tl.minimum(tl.load(known_ptr + row), length)
    prompt = place < tl.load(prompt_ptr + row)
    token = tl.load(tokens_ptr + row * length + place, mask=known, other=0).to(tl.int64)
    count_ptrs = counts_ptr + row * V + token
    tl.atomic_or(count_ptrs, IN_PROMPT, mask=known & prompt, sem="relaxed")
    tl.atomic_add(count_ptrs, 1, mask=known & ~prompt, sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=["repetition_ptr", "presence_ptr", "frequency_ptr"])
def _penalise_kernel(
    logits_ptr,
    counts_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    out_ptr,
    V,
    row_stride,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < V
    x = tl.load(logits_ptr + row * row_stride + columns, mask=inside, other=0.0)
    word = tl.load(counts_ptr + row * V + columns, mask=inside, other=0)
    count = (word & (IN_PROMPT - 1)).to(tl.float32)
    repetition = tl.load(repetition_ptr + row) + tl.zeros_like(x)
    x = tl.where(word != 0, tl.where(x > 0, tl.div_rn(x, repetition), x * repetition), x)
    x = x - count * tl.load(frequency_ptr + row)
    x = x - tl.where(count > 0, tl.load(presence_ptr + row), 0.0)
    tl.store(out_ptr + row * V + columns, x, mask=inside)


def penalise_triton(
    logits_RV: Tensor,
    tokens_RL: Tensor,
    prompt_R: Tensor,
    known_R: Tensor,
    repetition_R: Tensor,
    presence_R: Tensor,
    frequency_R: Tensor,
) -> Tensor:
    """As the reference; tokens_RL is contiguous."""
    R, V = logits_RV.shape
    length = tokens_RL.shape[1]
    counts_RV = torch.zeros((R, V), dtype=torch.int32, device=logits_RV.device)
    out_RV = torch.empty((R, V), device=logits_RV.device)
    grid = (R, triton.cdiv(length, BLOCK))
    launch(_count_kernel, grid, tokens_RL, prompt_R, known_R, counts_RV, length, V, BLOCK=BLOCK, num_warps=4)
    launch(
        _penalise_kernel,
        (R, triton.cdiv(V, BLOCK)),
        *(logits_RV, counts_RV, repetition_R, presence_R, frequency_R, out_RV, V, logits_RV.stride(0)),
        BLOCK=BLOCK,
        num_warps=4,
        # count · frequency is rounded before it is subtracted
        enable_fp_fusion=False,
    )
    return out_RV


def _example() -> None:
    real, whole = torch.empty(8, device="meta"), torch.empty(8, dtype=torch.int64, device="meta")
    tokens_RL = torch.empty((8, 4096), dtype=torch.int32, device="meta")
    penalise_triton(torch.empty((8, 128256), device="meta"), tokens_RL, whole, whole, real, real, real)


VARIANTS: dict[str, Callable[[], None]] = {"128256": _example}
