"""What the attention kernels share: a tile of query rows walks keys by online softmax, and states merge.

A row is one query head of one token; rows that read the same KV head lie in one tile (GQA, MQA). Keys are
taken in tiles of BLOCK_N that begin at its multiples, so a row meets the same keys in the same order
whatever tile it is in; a tile of keys it does not see leaves its state as it was, bit for bit. Where
product and sum belong together they are written as fma, and kernels are compiled without contraction, so
that this holds between kernels too.

State of a row: peak (log2 of the largest weight so far), total (sum of weights), acc [D] (weighted values).
Milakov & Gimelshein 2018 (online softmax), Dao et al. 2022 and 2023 (FlashAttention, flash-decoding).
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
# an fp32 of 1.5·2^23, whose last bits count ones
INT_MAGIC = tl.constexpr(0x4B400000)
FLOAT_MAGIC = tl.constexpr(float(3 << 22))


class Pages(NamedTuple):
    """One sequence's keys and values of one KV head: pointers, and the strides between its blocks.

    Scales are read for quantised caches only.
    """

    table: tl.tensor
    k: tl.tensor
    v: tl.tensor
    block_stride: tl.tensor
    k_scales: tl.tensor
    v_scales: tl.tensor
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
    return acc * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]


@triton.jit
def widen(x, dtype: tl.constexpr, KV: tl.constexpr, FAST_WIDEN: tl.constexpr):
    """Stored numbers (bits in int8 where quantised) as `dtype`, exactly; their scale is the caller's.

    Where the chip converts slowly (an eighth of its rate on sm_80) integer operations do it.
    """
    if KV == "fp8":
        if FAST_WIDEN:
            # by fp32, since fp16 to bf16 is slow everywhere
            x = x.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(tl.float32)
        else:
            x = ((x.to(tl.int32) << 20) & FP8_FP32_BITS).to(tl.float32, bitcast=True) * FP8_BIAS
    elif KV == "int8":
        if FAST_WIDEN:
            x = x.to(tl.float32)
        else:
            x = (x.to(tl.int32) + INT_MAGIC).to(tl.float32, bitcast=True) - FLOAT_MAGIC
    return x.to(dtype)


@triton.jit
def walk(
    q,
    peak,
    total,
    acc,
    first,
    last,
    lo,
    hi,
    pages,
    scale,
    soft_cap,
    MASKED: tl.constexpr,
    BOUNDED: tl.constexpr,
    CAPPED: tl.constexpr,
    KV: tl.constexpr,
    FAST_WIDEN: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """State of the rows after the tiles of keys that hold lo ≤ n < hi.

    q [M, D_PAD], zero where padded. Masked: row i sees keys first[i] ≤ n ≤ last[i] < hi (if not bounded, all
    from 0 on); otherwise all rows see every key of the tiles. Key hi - 1 and, if below it, lo can be read.
    """
    d = tl.arange(0, q.shape[1])
    for start in tl.range(lo // BLOCK_N * BLOCK_N, hi, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        at = n
        if MASKED:
            # keys that no row sees are read as the nearest that one does: cheaper than masks, and never stale
            at = tl.minimum(tl.maximum(n, lo), hi - 1)
        # unsigned, since division of signed numbers rounds towards zero
        at = at.to(tl.uint32)
        block = tl.load(pages.table + at // BLOCK_SIZE).to(tl.int64)
        cell = at % BLOCK_SIZE
        cells = (block * pages.block_stride + cell * D)[:, None] + d[None, :]
        if q.shape[1] == D:
            k, v = tl.load(pages.k + cells), tl.load(pages.v + cells)
        else:
            real = tl.broadcast_to((d < D)[None, :], cells.shape)
            k, v = tl.load(pages.k + cells, mask=real, other=0), tl.load(pages.v + cells, mask=real, other=0)
        scores = dot(q, widen(k, q.dtype, KV, FAST_WIDEN).T, tl.zeros((q.shape[0], BLOCK_N), tl.float32))
        factor = scale * LOG2_E
        if KV != "plain":
            scale_cells = block * pages.scale_stride + cell
            scores *= tl.load(pages.k_scales + scale_cells)[None, :]
        if CAPPED:
            # tanh, which is 1 long before the exponential would overflow
            twice = tl.minimum(scores * (2.0 * LOG2_E * scale / soft_cap), 64.0)
            scores = 1.0 - 2.0 / (1.0 + tl.exp2(twice))
            factor = soft_cap * LOG2_E
        if MASKED:
            seen = n[None, :] <= last[:, None]
            if BOUNDED:
                seen = seen & (n[None, :] >= first[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        top = tl.maximum(peak, tl.max(scores, 1) * factor)
        base = tl.where(top == float("-inf"), 0.0, top)
        fade = tl.exp2(peak - base)
        weights = tl.exp2(tl.fma(scores, tl.full(scores.shape, factor, tl.float32), -base[:, None]))
        total = tl.fma(total, fade, tl.sum(weights, 1))
        if KV == "plain":
            weights = weights.to(v.dtype)
        else:
            # bf16 holds int8 and e4m3 exactly, and weights times scales without underflow
            weights = (weights * tl.load(pages.v_scales + scale_cells)[None, :]).to(tl.bfloat16)
            v = widen(v, tl.bfloat16, KV, FAST_WIDEN)
        acc = dot(weights, v, acc * fade[:, None])
        peak = top
    return peak, total, acc
