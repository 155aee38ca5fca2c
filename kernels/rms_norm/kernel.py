"""Root-mean-square norm in Triton, with or without the residual stream. Formula, shapes: see `reference.py`.

x, w and the result in float32, bfloat16 or float16; the residual stream in float32. One program per row,
which is read once and written once; sums in fp32 in an order that the width decides. Tolerance: one rounding.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import launch


@triton.jit
def _rms_norm_kernel(x_ptr, residual_ptr, w_ptr, out_ptr, D, eps, BLOCK_D: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_D)
    inside = columns < D
    x = tl.load(x_ptr + row * D + columns, mask=inside, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        residual_ptrs = residual_ptr + row * D + columns
        x += tl.load(residual_ptrs, mask=inside, other=0.0)
        tl.store(residual_ptrs, x, mask=inside)
    factor = tl.rsqrt(tl.sum(x * x) / D + eps)
    w = tl.load(w_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * D + columns, (x * factor * w).to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm_triton(x_TD: Tensor, w_D: Tensor, eps: float) -> Tensor:
    """Norm of the last dimension, in w's dtype; x_TD of any leading shape."""
    x_TD = x_TD.contiguous()
    out_TD = torch.empty_like(x_TD, dtype=w_D.dtype)
    _launch(x_TD, None, w_D, out_TD, eps)
    return out_TD


def add_rms_norm_triton_(x_TD: Tensor, residual_TD: Tensor, w_D: Tensor, eps: float) -> Tensor:
    """residual += x, in place; its norm in x's dtype. Both contiguous."""
    out_TD = torch.empty_like(x_TD)
    _launch(x_TD, residual_TD, w_D, out_TD, eps)
    return out_TD


def _launch(x_TD: Tensor, residual_TD: Tensor | None, w_D: Tensor, out_TD: Tensor, eps: float) -> None:
    D = w_D.shape[0]
    block = triton.next_power_of_2(D)
    # 16 bytes of bfloat16 per thread and load
    warps = min(max(block // 256, 1), 16)
    launch(
        _rms_norm_kernel,
        (x_TD.numel() // D,),
        *(x_TD, residual_TD, w_D, out_TD, D, eps),
        BLOCK_D=block,
        num_warps=warps,
    )


def _example(D: int, *, add: bool) -> None:
    x_TD = torch.empty((8, D), device="meta", dtype=torch.bfloat16)
    w_D = torch.empty(D, device="meta", dtype=torch.bfloat16)
    if add:
        add_rms_norm_triton_(x_TD, torch.empty((8, D), device="meta"), w_D, 1e-5)
    else:
        rms_norm_triton(x_TD, w_D, 1e-5)


VARIANTS: dict[str, Callable[[], None]] = {
    "add, 4096": lambda: _example(4096, add=True),
    "add, 8192": lambda: _example(8192, add=True),
    "head of 128": lambda: _example(128, add=False),
}
