"""Norm, projection and gate in Triton. Formula, shapes: `reference.py`; tolerance: `../linear/kernel.py`.

Few rows: one kernel reads the residual stream and the weights, nothing between them touches memory. More
rows: one kernel rounds h∘n and sums the squares, the linear kernel divides. Both add in the same order and
give a row the same bits. float16 would lose the small products h∘n, which come before the division: there the
norm is a kernel of its own, for every number of rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import chip_of, launch
from ..linear.kernel import norm_factor, project, row_class, split_size, tree_sum
from ..rms_norm.kernel import rms_norm_triton
from ..tuning import params


@triton.jit
def _norm_rows_kernel(
    h_ptr,
    norm_ptr,
    z_ptr,
    factor_ptr,
    K,
    split,
    eps,
    offset,
    SPLITS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LOG2_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    squares = tl.zeros((1,), tl.float32)
    for i in range(SPLITS):
        acc = tl.zeros((1, BLOCK_K), tl.float32)
        for start in range(i * split, tl.minimum((i + 1) * split, K), BLOCK_K):
            columns = start + tl.arange(0, BLOCK_K)[None, :]
            h = tl.load(h_ptr + row * K + columns, mask=columns < K, other=0.0)
            weight = tl.load(norm_ptr + columns, mask=columns < K, other=0.0)
            acc = tl.fma(h, h, acc)
            z = (h * (weight.to(tl.float32) + offset)).to(weight.dtype)
            tl.store(z_ptr + row * K + columns, z, mask=columns < K)
        squares += tree_sum(acc, 1, LOG2_K)
    tl.store(factor_ptr + row + tl.arange(0, 1), norm_factor(squares, K, eps))


def norm_linear_triton(
    h_TK: Tensor,
    norm_K: Tensor,
    eps: float,
    w_NK: Tensor,
    scale_N: Tensor | None = None,
    bias_N: Tensor | None = None,
    activation: str | None = None,
    *,
    offset: float = 0.0,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """As the reference, in `out_dtype` if given; h_TK is contiguous."""
    T, N = h_TK.shape[0], w_NK.shape[0] // (2 if activation else 1)
    out_TN = torch.empty((T, N), dtype=out_dtype or norm_K.dtype, device=h_TK.device)
    if norm_K.dtype == torch.float16:
        x_TK = rms_norm_triton(h_TK, norm_K, eps, offset)
        project(x_TK, w_NK, scale_N, bias_N, out_TN, activation=activation)
    elif row_class(T) == "few":
        weights = (w_NK, scale_N, bias_N)
        project(h_TK, *weights, out_TN, activation=activation, norm_K=norm_K, eps=eps, offset=offset)
    else:
        z_TK, factor_T = _norm_rows(h_TK, norm_K, eps, offset, N, gated=activation is not None)
        project(z_TK, w_NK, scale_N, bias_N, out_TN, activation=activation, factor_T=factor_T)
    return out_TN


def _norm_rows(
    h_TK: Tensor, norm_K: Tensor, eps: float, offset: float, N: int, *, gated: bool
) -> tuple[Tensor, Tensor]:
    """(h∘n rounded, 1/sqrt(mean(h²) + eps)), squares summed as the fused kernel for these weights does."""
    T, K = h_TK.shape
    chip = chip_of(h_TK.device)
    block = params("linear_gated" if gated else "linear", "few", chip).blocks["BLOCK_K"]
    split = split_size(N, K, chip, gated=gated)
    z_TK = torch.empty_like(h_TK, dtype=norm_K.dtype)
    factor_T = torch.empty(T, dtype=torch.float32, device=h_TK.device)
    launch(
        _norm_rows_kernel,
        (T,),
        *(h_TK, norm_K, z_TK, factor_T, K, split, eps, offset),
        SPLITS=-(-K // split),
        BLOCK_K=block,
        LOG2_K=block.bit_length() - 1,
        num_warps=1,
    )
    return z_TK, factor_T


def _example(T: int, N: int, K: int, *, int8: bool = False, activation: str | None = None) -> None:
    w_NK = torch.empty((N, K), device="meta", dtype=torch.int8 if int8 else torch.bfloat16)
    norm_linear_triton(
        torch.empty((T, K), device="meta"),
        torch.empty(K, device="meta", dtype=torch.bfloat16),
        1e-5,
        w_NK,
        torch.empty(N, device="meta") if int8 else None,
        activation=activation,
    )


VARIANTS: dict[str, Callable[[], None]] = {
    "qkv": lambda: _example(1, 6144, 4096),
    "qkv, int8": lambda: _example(1, 6144, 4096, int8=True),
    "gate and up, silu": lambda: _example(1, 28672, 4096, activation="silu"),
    "gate and up, silu, int8": lambda: _example(1, 28672, 4096, activation="silu", int8=True),
    "gate and up, gelu": lambda: _example(1, 28672, 4096, activation="gelu_tanh"),
    "gate and up, silu, some rows": lambda: _example(64, 28672, 4096, activation="silu"),
    "gate and up, silu, many rows": lambda: _example(2048, 28672, 4096, activation="silu"),
}
