"""What the attention kernels share: a tile of query rows walks keys with an online softmax, and states merge.

A row is one query head of one token; rows that read the same KV head lie in one tile (GQA, MQA). Keys are taken in
tiles of BLOCK_N that begin at multiples of BLOCK_N, so a row meets the same keys in the same order whatever tile it
is in; a tile of keys it does not see leaves its state as it was, bit for bit. Products and sums are written as fma,
and kernels are compiled without contraction, so that this also holds between kernels.

State of a row: peak (log2 of the largest weight so far), total (sum of weights), acc [D] (weighted values), from
Milakov & Gimelshein 2018 (online softmax) and Dao et al. 2022, 2023 (FlashAttention, flash-decoding).
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ..primitives import dot

LOG2_E = tl.constexpr(1.4426950408889634)
# e4m3 read as the top bits of an fp32 is too small by the difference of the exponents' biases, 127 - 7
FP8_BIAS = tl.constexpr(float(2**120))
FP8_FP32_BITS = tl.constexpr(0x87F00000 - (1 << 32))


class Pages(NamedTuple):
    """One sequence's keys and values of one KV head: pointers, and the strides between its blocks.

    Scales are read for quantised caches only.
    """

    table: tl.tensor
    keys: tl.tensor
    values: tl.tensor
    block_stride: tl.tensor
    key_scales: tl.tensor
    value_scales: tl.tensor
    scale_stride: tl.tensor


@triton.jit
def no_keys(ROWS: tl.constexpr, D_PAD: tl.constexpr):
    """The state before the first key."""
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    return peak, tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, D_PAD), tl.float32)


@triton.jit
def merge(peak, total, acc, other_peak, other_total, other_acc):
    """One state for the keys of both; neither order nor grouping is free, so callers merge by position."""
    top = tl.maximum(peak, other_peak)
    base = tl.where(top == float("-inf"), 0.0, top)
    fade, gain = tl.exp2(peak - base), tl.exp2(other_peak - base)
    total = tl.fma(total, fade, other_total * gain)
    acc = tl.fma(acc, tl.broadcast_to(fade[:, None], acc.shape), other_acc * gain[:, None])
    return top, total, acc


@triton.jit
def finish(peak, total, acc, learned, LEARNED: tl.constexpr):
    """Output rows; a learned logit [rows] is a key without a value. A row without keys gives zeros."""
    if LEARNED:
        learned = learned * LOG2_E
        top = tl.maximum(peak, learned)
        fade = tl.exp2(peak - top)
        total = tl.fma(total, fade, tl.exp2(learned - top))
        acc = acc * fade[:, None]
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def widen(x, dtype: tl.constexpr, KV: tl.constexpr, FP8_NATIVE: tl.constexpr):
    """Stored numbers (int8 bits where quantised) as `dtype`, exactly; their scale is the caller's."""
    if KV == "fp8":
        if FP8_NATIVE:
            x = x.to(tl.float8e4nv, bitcast=True).to(dtype)
        else:
            bits = (x.to(tl.int32) << 20) & FP8_FP32_BITS
            x = (bits.to(tl.float32, bitcast=True) * FP8_BIAS).to(dtype)
    elif KV == "int8":
        x = x.to(tl.float32).to(dtype)
    return x


@triton.jit
def walk(
    q,
    peak,
    total,
    acc,
    positions,
    lo,
    hi,
    pages,
    scale,
    soft_cap,
    window,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    KV: tl.constexpr,
    FP8_NATIVE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """State of the rows after keys lo ≤ n < hi. Unmasked: all rows see all of them, in whole tiles.

    q [M, D_PAD], zero where padded; positions [M].
    """
    d = tl.arange(0, q.shape[1])
    for start in tl.range(lo // BLOCK_N * BLOCK_N, hi, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        inside = (n >= lo) & (n < hi)
        if MASKED:
            block = tl.load(pages.table + n // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
            wanted = inside[:, None] & (d < D)[None, :]
        else:
            block = tl.load(pages.table + n // BLOCK_SIZE).to(tl.int64)
            wanted = (d < D)[None, :]
        cells = (block * pages.block_stride + n % BLOCK_SIZE * D)[:, None] + d[None, :]
        k = widen(tl.load(pages.keys + cells, mask=wanted, other=0), q.dtype, KV, FP8_NATIVE)
        scores = dot(q, k.T, tl.zeros((q.shape[0], BLOCK_N), tl.float32))
        factor = scale * LOG2_E
        if KV != "plain":
            scale_cells = block * pages.scale_stride + n % BLOCK_SIZE
            scores *= tl.load(pages.key_scales + scale_cells, mask=inside, other=0)[None, :]
        if CAPPED:
            # tanh, stable on both sides: the exponential may overflow to infinity
            scores = 1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.0 * LOG2_E * scale / soft_cap)))
            factor = soft_cap * LOG2_E
        if MASKED:
            seen = inside[None, :] & (n[None, :] <= positions[:, None])
            if WINDOWED:
                seen = seen & (n[None, :] > positions[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        top = tl.maximum(peak, tl.max(scores, 1) * factor)
        base = tl.where(top == float("-inf"), 0.0, top)
        fade = tl.exp2(peak - base)
        weights = tl.exp2(tl.fma(scores, tl.full(scores.shape, factor, tl.float32), -base[:, None]))
        total = tl.fma(total, fade, tl.sum(weights, 1))
        v = tl.load(pages.values + cells, mask=wanted, other=0)
        if KV == "plain":
            weights = weights.to(v.dtype)
        else:
            # bf16 holds int8 and e4m3 exactly, and weights times scales without underflow
            weights *= tl.load(pages.value_scales + scale_cells, mask=inside, other=0)[None, :]
            weights = weights.to(tl.bfloat16)
            v = widen(v, tl.bfloat16, KV, FP8_NATIVE)
        acc = dot(weights, v, acc * fade[:, None])
        peak = top
    return peak, total, acc
