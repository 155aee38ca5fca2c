"""Linear layers in Triton: one kernel for every number of rows, with what surrounds a projection folded in.

Formula: y = x·Wᵀ·s (+ b), where s scales the rows of int8 weights. Around it, each optional:
  norm      x is the fp32 residual stream h: y = (h∘n)·Wᵀ / sqrt(mean(h²) + eps) (Zhang & Sennrich 2019), n
            being the norm's weights + offset; the division comes after the product, so that weights stream
            while the squares are summed
  row scale that division, where another kernel summed the squares
  gate      y = act(x·Gᵀ)∘(x·Uᵀ) with W = [G; U] (Shazeer 2020)
  add       out (fp32) += y, in place
Shapes: x [T, K], W [N, K] (gate: [2N, K]) in x's dtype or int8, s and b over W's rows, out [T, N].
Tolerance: products in x's dtype, sums in fp32; root mean square of the error under 0.4 % (bf16).

The order of a sum over K depends on (N, K, chip) alone: chunks of BLOCK_K ascending within splits of a fixed
size, splits ascending. Weights are the left operand, so that one row and thousands use the same matrix
instructions. Few rows: a program per split, and whoever finishes a tile last adds the splits up. Many rows: a
program per tile. Both give the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import Chip, chip_of, launch
from ..primitives import activate, dot
from ..tuning import Params, params

# tiles that are shared between splits are fewer than two per multiprocessor
COUNTERS = 4096
# less to sum than this is not worth a program and its part of the merge
MIN_SPLIT = 512
MAX_SPLITS = 16


@triton.jit
def tree_sum(x, ROWS: tl.constexpr, LOG2: tl.constexpr):
    """Sum over the last of [ROWS, 2**LOG2] by halves: one order in every kernel and on any chip."""
    for i in tl.static_range(LOG2):
        first, second = tl.split(tl.reshape(x, (ROWS, 1 << (LOG2 - i - 1), 2)))
        x = first + second
    return tl.reshape(x, (ROWS,))


@triton.jit
def norm_factor(squares, K, eps):
    return tl.rsqrt(squares / K + eps)


@triton.jit
def _widen(w, dtype: tl.constexpr, FAST_WIDEN: tl.constexpr):
    if w.dtype == tl.int8 and not FAST_WIDEN:
        # an integer in the last bits of 1.5·2²³: conversions run at a quarter of the rate on sm_80
        w = (w.to(tl.int32) + 0x4B400000).to(tl.float32, bitcast=True) - 12582912.0
    return w.to(dtype)


@triton.jit
def products(
    x_ptr,
    w_ptr,
    norm_ptr,
    rows_t,
    rows_n,
    begin,
    end,
    T,
    N,
    K,
    x_stride,
    offset,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    STREAM: tl.constexpr,
    FAST_WIDEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LOG2_K: tl.constexpr,
):
    """Over K in [begin, end): products [BLOCK_N, BLOCK_T], those of the up half, sums of squares."""
    acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    acc_up = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    squares = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
    policy: tl.constexpr = "evict_first" if STREAM else ""
    for start in range(begin, end, BLOCK_K):
        columns = start + tl.arange(0, BLOCK_K)
        x_mask = rows_t[:, None] < T
        w_mask = rows_n[:, None] < N
        if not EVEN_K:
            x_mask = x_mask & (columns[None, :] < K)
            w_mask = w_mask & (columns[None, :] < K)
        x = tl.load(x_ptr + rows_t[:, None] * x_stride + columns[None, :], mask=x_mask, other=0.0)
        if NORM:
            squares = tl.fma(x, x, squares)
            weight = tl.load(norm_ptr + columns) if EVEN_K else tl.load(norm_ptr + columns, columns < K, 0.0)
            x = (x * (weight.to(tl.float32) + offset)[None, :]).to(weight.dtype)
        w_ptrs = w_ptr + rows_n[:, None] * K + columns[None, :]
        if EVEN_N and EVEN_K:
            w = tl.load(w_ptrs, eviction_policy=policy)
        else:
            w = tl.load(w_ptrs, mask=w_mask, other=0.0, eviction_policy=policy)
        acc = dot(_widen(w, x.dtype, FAST_WIDEN), tl.trans(x), acc)
        if GATED:
            up_ptrs = w_ptrs + N * K
            if EVEN_N and EVEN_K:
                w = tl.load(up_ptrs, eviction_policy=policy)
            else:
                w = tl.load(up_ptrs, mask=w_mask, other=0.0, eviction_policy=policy)
            acc_up = dot(_widen(w, x.dtype, FAST_WIDEN), tl.trans(x), acc_up)
    return acc, acc_up, tree_sum(squares, BLOCK_T, LOG2_K) if NORM else tl.zeros((BLOCK_T,), tl.float32)


@triton.jit
def finish(total, w_scale_ptr, bias_ptr, rows_n, mask_n, factor, FACTOR: tl.constexpr):
    if w_scale_ptr is not None:
        total = total * tl.load(w_scale_ptr + rows_n, mask=mask_n, other=0.0)[:, None]
    if FACTOR:
        total = total * factor[None, :]
    if bias_ptr is not None:
        total = total + tl.load(bias_ptr + rows_n, mask=mask_n, other=0.0).to(tl.float32)[:, None]
    return total


# the number of rows changes from step to step and must not compile anew
@triton.jit(do_not_specialize=["T"])
def _linear_kernel(
    x_ptr,
    w_ptr,
    w_scale_ptr,
    bias_ptr,
    norm_ptr,
    factor_ptr,
    out_ptr,
    partial_ptr,
    counter_ptr,
    T,
    N,
    K,
    x_stride,
    split,
    eps,
    offset,
    SPLITS: tl.constexpr,
    PARALLEL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ADD: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    STREAM: tl.constexpr,
    FAST_WIDEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LOG2_K: tl.constexpr,
):
    NORM: tl.constexpr = norm_ptr is not None
    GATED: tl.constexpr = ACTIVATION is not None
    rows_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    # 64 bits: a vocabulary times a hidden size passes 2**31
    rows_n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    total_up = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    squares = tl.zeros((BLOCK_T,), tl.float32)
    last = True
    if PARALLEL:
        part = tl.program_id(2)
        begin = part * split
        acc, acc_up, square = products(
            x_ptr, w_ptr, norm_ptr, rows_t, rows_n, begin, tl.minimum(begin + split, K), T, N, K, x_stride,
            offset, NORM, GATED, EVEN_N, EVEN_K, STREAM, FAST_WIDEN, BLOCK_N, BLOCK_T, BLOCK_K, LOG2_K,
        )  # fmt: skip
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        TILE: tl.constexpr = BLOCK_N * BLOCK_T
        SIZE: tl.constexpr = TILE * 2 + BLOCK_T
        tile_ptr = partial_ptr + tile.to(tl.int64) * (SPLITS * SIZE)
        inside = tl.arange(0, BLOCK_N)[:, None] * BLOCK_T + tl.arange(0, BLOCK_T)[None, :]
        behind = 2 * TILE + tl.arange(0, BLOCK_T)
        own_ptr = tile_ptr + part * SIZE
        tl.store(own_ptr + inside, acc)
        if GATED:
            tl.store(own_ptr + TILE + inside, acc_up)
        if NORM:
            tl.store(own_ptr + behind, square)
        # all threads' stores come before the count that announces them
        tl.debug_barrier()
        last = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel") == SPLITS - 1
        if last:
            # left as it was found, for the next launch
            tl.store(counter_ptr + tile, 0)
            for i in range(SPLITS):
                part_ptr = tile_ptr + i * SIZE
                total += tl.load(part_ptr + inside, cache_modifier=".cg")
                if GATED:
                    total_up += tl.load(part_ptr + TILE + inside, cache_modifier=".cg")
                if NORM:
                    squares += tl.load(part_ptr + behind, cache_modifier=".cg")
    else:
        for i in range(SPLITS):
            acc, acc_up, square = products(
                x_ptr, w_ptr, norm_ptr, rows_t, rows_n, i * split, tl.minimum((i + 1) * split, K), T, N, K,
                x_stride, offset, NORM, GATED, EVEN_N, EVEN_K, STREAM, FAST_WIDEN, BLOCK_N, BLOCK_T, BLOCK_K,
                LOG2_K,
            )  # fmt: skip
            total += acc
            total_up += acc_up
            squares += square
    if last:
        mask_n, mask_t = rows_n < N, rows_t < T
        factor = squares
        if NORM:
            factor = norm_factor(squares, K, eps)
        elif factor_ptr is not None:
            factor = tl.load(factor_ptr + rows_t, mask=mask_t, other=0.0)
        FACTOR: tl.constexpr = NORM or factor_ptr is not None
        y = finish(total, w_scale_ptr, bias_ptr, rows_n, mask_n, factor, FACTOR)
        if GATED:
            up = finish(total_up, w_scale_ptr, bias_ptr, rows_n + N, mask_n, factor, FACTOR)
            y = activate(y, ACTIVATION) * up
        out_ptrs = out_ptr + rows_t.to(tl.int64)[None, :] * N + rows_n[:, None]
        mask = mask_n[:, None] & mask_t[None, :]
        if ADD:
            y += tl.load(out_ptrs, mask=mask, other=0.0)
        tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=mask)


def linear_triton(
    x_TK: Tensor,
    w_NK: Tensor,
    scale_N: Tensor | None = None,
    bias_N: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """x·Wᵀ·s + b → [tokens, out] in `out_dtype` (x's own if not given); x's rows may lie apart."""
    out_TN = torch.empty((x_TK.shape[0], w_NK.shape[0]), dtype=out_dtype or x_TK.dtype, device=x_TK.device)
    project(x_TK, w_NK, scale_N, bias_N, out_TN)
    return out_TN


def linear_add_triton_(
    x_TK: Tensor, w_NK: Tensor, scale_N: Tensor | None, bias_N: Tensor | None, residual_TN: Tensor
) -> None:
    """residual (fp32, contiguous) += x·Wᵀ·s + b, in place, without rounding what is added."""
    project(x_TK, w_NK, scale_N, bias_N, residual_TN, add=True)


def project(
    x_TK: Tensor,
    w_NK: Tensor,
    scale_N: Tensor | None,
    bias_N: Tensor | None,
    out_TN: Tensor,
    *,
    activation: str | None = None,
    add: bool = False,
    norm_K: Tensor | None = None,
    factor_T: Tensor | None = None,
    eps: float = 0.0,
    offset: float = 0.0,
) -> None:
    """The kernel with all that can be folded into it, see above; writes out_TN, which is contiguous."""
    (T, K), N = x_TK.shape, out_TN.shape[1]
    chip = chip_of(x_TK.device)
    found = params("linear_gated" if activation else "linear", row_class(T), chip)
    blocks = found.blocks
    split = split_size(N, K, chip, gated=activation is not None)
    splits = -(-K // split)
    tiles = (-(-T // blocks["BLOCK_T"]), -(-N // blocks["BLOCK_N"]))
    parallel = splits > 1 and tiles[0] * tiles[1] < 2 * chip.multiprocessors
    partial, counters = None, None
    if parallel:
        size = tiles[0] * tiles[1] * splits * (2 * blocks["BLOCK_N"] + 1) * blocks["BLOCK_T"]
        partial = torch.empty(size, dtype=torch.float32, device=x_TK.device)
        counters = tile_counters(x_TK.device)
    launch(
        _linear_kernel,
        (*tiles, splits if parallel else 1),
        *(x_TK, w_NK, scale_N, bias_N, norm_K, factor_T, out_TN, partial, counters),
        *(T, N, K, x_TK.stride(0), split, eps, offset),
        SPLITS=splits,
        PARALLEL=parallel,
        ACTIVATION=activation,
        ADD=add,
        EVEN_N=N % blocks["BLOCK_N"] == 0,
        EVEN_K=K % blocks["BLOCK_K"] == 0,
        STREAM=tiles[0] == 1,
        FAST_WIDEN=chip.native_fp8,
        LOG2_K=blocks["BLOCK_K"].bit_length() - 1,
        **matrix_options(found, chip),
    )


def row_class(T: int) -> str:
    """The shape class of a number of rows in the tuning table."""
    return "few" if T <= 16 else "some" if T <= 64 else "many"


@functools.cache
def split_size(N: int, K: int, chip: Chip, *, gated: bool) -> int:
    """Part of K that one program sums in decode: so many that two programs run on each multiprocessor.

    A function of the weights' shape and the chip alone, since it decides the order of the sum.
    """
    blocks = params("linear_gated" if gated else "linear", "few", chip).blocks
    tiles = -(-N // blocks["BLOCK_N"])
    splits = max(1, min(2 * chip.multiprocessors // tiles, K // MIN_SPLIT, MAX_SPLITS))
    chunks = -(-K // blocks["BLOCK_K"])
    return -(-chunks // splits) * blocks["BLOCK_K"]


@functools.cache
def tile_counters(device: torch.device) -> Tensor:
    """Zeros that every launch leaves as zeros. The first call must not be inside a graph capture."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


def matrix_options(found: Params, chip: Chip) -> dict[str, Any]:
    # one matrix instruction for all numbers of rows, or sums would differ between them
    return {**found.options, "matrix_instr_nonkdim": 16} if chip.amd else found.options


def _example(T: int, N: int, K: int, dtype: torch.dtype, out_dtype: torch.dtype, *, add: bool) -> None:
    x_TK = torch.empty((T, K), device="meta", dtype=torch.bfloat16)
    w_NK = torch.empty((N, K), device="meta", dtype=dtype)
    scale_N = torch.empty(N, device="meta") if dtype == torch.int8 else None
    if add:
        linear_add_triton_(x_TK, w_NK, scale_N, None, torch.empty((T, N), device="meta"))
    else:
        linear_triton(x_TK, w_NK, scale_N, out_dtype=out_dtype)


_BF16, _F32, _INT8 = torch.bfloat16, torch.float32, torch.int8
VARIANTS: dict[str, Callable[[], None]] = {
    "down, add": lambda: _example(1, 4096, 14336, _BF16, _BF16, add=True),
    "down, add, int8": lambda: _example(1, 4096, 14336, _INT8, _BF16, add=True),
    "head, fp32 out": lambda: _example(8, 128256, 4096, _BF16, _F32, add=False),
    "some rows": lambda: _example(64, 4096, 4096, _BF16, _BF16, add=False),
    "many rows": lambda: _example(2048, 4096, 4096, _BF16, _BF16, add=False),
    "many rows, int8": lambda: _example(2048, 4096, 4096, _INT8, _BF16, add=False),
    "uneven sizes": lambda: _example(1, 960, 576, _BF16, _BF16, add=False),
}
