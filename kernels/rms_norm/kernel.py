"""Root-mean-square norm in Triton, of and into the residual stream. Formula, shapes: see `reference.py`.

x, w and the result in float32, bfloat16 or float16; the residual stream in float32. One program per row,
which is read once and written once; sums in fp32 in an order that the width decides. Tolerance: one rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import launch


@triton.jit
def _rms_norm_kernel(x_ptr, residual_ptr, w_ptr, out_ptr, D, eps, offset, BLOCK_D: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_D)
    inside = columns < D
    x = tl.load(x_ptr + row * D + columns, mask=inside, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        residual_ptrs = residual_ptr + row * D + columns
        x += tl.load(residual_ptrs, mask=inside, other=0.0)
        tl.store(residual_ptrs, x, mask=inside)
    factor = tl.rsqrt(tl.sum(x * x) / D + eps)
    w = tl.load(w_ptr + columns, mask=inside, other=0.0).to(tl.float32) + offset
    tl.store(out_ptr + row * D + columns, (x * factor * w).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _norm_add_kernel(x_ptr, residual_ptr, w_ptr, D, eps, offset, BLOCK_D: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_D)
    inside = columns < D
    x = tl.load(x_ptr + row * D + columns, mask=inside, other=0.0).to(tl.float32)
    residual_ptrs = residual_ptr + row * D + columns
    residual = tl.load(residual_ptrs, mask=inside, other=0.0)
    w = tl.load(w_ptr + columns, mask=inside, other=0.0).to(tl.float32) + offset
    factor = tl.rsqrt(tl.sum(x * x) / D + eps)
    tl.store(residual_ptrs, residual + x * factor * w, mask=inside)


@triton.jit
def _norm_heads_kernel(x_ptr, w_ptr, heads, D, eps, offset, BLOCK_D: tl.constexpr):
    head = tl.program_id(1)
    columns = tl.arange(0, BLOCK_D)
    inside = columns < D
    x_ptrs = x_ptr + (tl.program_id(0).to(tl.int64) * heads + head) * D + columns
    x = tl.load(x_ptrs, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + head * D + columns, mask=inside, other=0.0).to(tl.float32) + offset
    factor = tl.rsqrt(tl.sum(x * x) / D + eps)
    tl.store(x_ptrs, (x * factor * w).to(x_ptr.dtype.element_ty), mask=inside)


def rms_norm_triton(x_TD: Tensor, w_D: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Norm of the last dimension, in w's dtype; x_TD of any leading shape."""
    x_TD = x_TD.contiguous()
    out_TD = torch.empty_like(x_TD, dtype=w_D.dtype)
    _launch(_rms_norm_kernel, (x_TD.numel() // w_D.shape[0],), (x_TD, None, w_D, out_TD), w_D, eps, offset)
    return out_TD


def add_rms_norm_triton_(
    x_TD: Tensor, residual_TD: Tensor, w_D: Tensor, eps: float, offset: float = 0.0
) -> Tensor:
    """residual += x, in place; its norm in x's dtype. Both contiguous."""
    out_TD = torch.empty_like(x_TD)
    _launch(_rms_norm_kernel, (x_TD.shape[0],), (x_TD, residual_TD, w_D, out_TD), w_D, eps, offset)
    return out_TD


def norm_add_triton_(x_TD: Tensor, residual_TD: Tensor, w_D: Tensor, eps: float, offset: float = 0.0) -> None:
    """residual += norm(x), in place, unrounded. Both contiguous."""
    _launch(_norm_add_kernel, (x_TD.shape[0],), (x_TD, residual_TD, w_D), w_D, eps, offset)


def norm_heads_triton_(x_THD: Tensor, w_HD: Tensor, eps: float, offset: float = 0.0) -> None:
    """The first heads of x, as many as w has rows, become their norms, in place. Both contiguous."""
    T, heads = x_THD.shape[:2]
    _launch(_norm_heads_kernel, (T, w_HD.shape[0]), (x_THD, w_HD, heads), w_HD, eps, offset)


def _launch(
    kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], w_D: Tensor, eps: float, offset: float
) -> None:
    D = w_D.shape[-1]
    block = triton.next_power_of_2(D)
    # 16 bytes of bfloat16 per thread and load
    warps = min(max(block // 256, 1), 16)
    launch(kernel, grid, *args, D, eps, offset, BLOCK_D=block, num_warps=warps)


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, device="meta", dtype=dtype)


def _example(D: int, *, add: bool = False) -> None:
    if add:
        add_rms_norm_triton_(_empty(8, D), _empty(8, D, dtype=torch.float32), _empty(D), 1e-5)
    else:
        rms_norm_triton(_empty(8, D), _empty(D), 1e-5)


VARIANTS: dict[str, Callable[[], None]] = {
    "add, 4096": lambda: _example(4096, add=True),
    "add, 8192": lambda: _example(8192, add=True),
    "head of 128": lambda: _example(128),
    "behind a projection, 640": lambda: norm_add_triton_(
        _empty(8, 640), _empty(8, 640, dtype=torch.float32), _empty(640), 1e-6, 1.0
    ),
    "five of six heads of 256": lambda: norm_heads_triton_(_empty(8, 6, 256), _empty(5, 256), 1e-6, 1.0),
}
