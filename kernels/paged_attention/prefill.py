"""Attention of prompt chunks against their cached prefix and themselves, any lengths in one launch.

A program is (tile of BLOCK_M rows of one sequence, KV head). Rows are query heads of tokens in order, so
tiles are full whatever the number of heads that share a KV head. The grid is an upper bound from host-known
numbers; a program finds its sequence by bisection. FlashAttention-2 (Dao 2023).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .walk import Pages, finish, merge, no_keys, walk


@triton.jit
def first_tile(query_start_ptr, seq, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Number of a sequence's first tile: each of those before it has room for one tile that is not full."""
    tokens = tl.load(query_start_ptr + seq) - tl.load(query_start_ptr)
    return tokens * GROUP // BLOCK_M + seq


@triton.jit
def sequence_of(query_start_ptr, tile, sequences, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """The last sequence whose first tile is not behind `tile`."""
    low, high = 0, sequences - 1
    while low < high:
        middle = (low + high + 1) // 2
        if first_tile(query_start_ptr, middle, GROUP, BLOCK_M) <= tile:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit(
    do_not_specialize=["window", "table_stride", "split_tokens", "sequences"],
    do_not_specialize_on_alignment=["table_ptr", "query_start_ptr", "context_ptr"],
)
def prefill_kernel(
    out_ptr,
    q_ptr,
    q_sink_ptr,
    keys_ptr,
    values_ptr,
    key_scales_ptr,
    value_scales_ptr,
    table_ptr,
    query_start_ptr,
    context_ptr,
    learned_ptr,
    scale,
    soft_cap,
    window,
    split_tokens,
    sequences,
    heads,
    q_stride,
    q_sink_stride,
    table_stride,
    block_stride,
    head_stride,
    scale_stride,
    scale_head_stride,
    BOUNDED: tl.constexpr,
    SINKS: tl.constexpr,
    CAPPED: tl.constexpr,
    LEARNED: tl.constexpr,
    INVARIANT: tl.constexpr,
    KV: tl.constexpr,
    FAST_WIDEN: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """out [tokens, heads, D]. Invariant: states of `split_tokens` keys are merged as decode merges them."""
    # late tiles have the most keys to walk: they start first
    tile, kv_head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    seq = sequence_of(query_start_ptr, tile, sequences, GROUP, BLOCK_M)
    first_row = (tile - first_tile(query_start_ptr, seq, GROUP, BLOCK_M)) * BLOCK_M
    q_first = tl.load(query_start_ptr + seq)
    q_len = tl.load(query_start_ptr + seq + 1) - q_first
    if first_row >= q_len * GROUP:
        return
    context = tl.load(context_ptr + seq)
    row = first_row + tl.arange(0, BLOCK_M)
    real = row < q_len * GROUP
    earliest = context - q_len + first_row // GROUP
    last_key = context - q_len + row // GROUP
    first_key = tl.maximum(SINKS, last_key - window + 1)
    hi = tl.minimum(context, context - q_len + (first_row + BLOCK_M - 1) // GROUP + 1)
    token = (q_first + row // GROUP).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    d = tl.arange(0, D_PAD)
    stored = real[:, None] & (d < D)[None, :]
    pages = Pages(
        table_ptr + seq.to(tl.int64) * table_stride,
        keys_ptr + kv_head * head_stride,
        values_ptr + kv_head * head_stride,
        block_stride,
        key_scales_ptr + kv_head * scale_head_stride,
        value_scales_ptr + kv_head * scale_head_stride,
        scale_stride,
    )
    q = tl.load(q_ptr + (token * q_stride + head * D)[:, None] + d[None, :], mask=stored, other=0)
    peak, total, acc = no_keys(BLOCK_M, D_PAD)
    lo = 0
    if SINKS > 0:
        cells = (token * q_sink_stride + head * D)[:, None] + d[None, :]
        q_sink = tl.load(q_sink_ptr + cells, mask=stored, other=0)
        peak, total, acc = walk(
            q_sink, peak, total, acc, first_key, tl.minimum(last_key, SINKS - 1), 0, tl.minimum(hi, SINKS),
            pages, scale, soft_cap, True, False, CAPPED, KV, FAST_WIDEN, D, BLOCK_SIZE, BLOCK_N,
        )  # fmt: skip
    if BOUNDED:
        lo = tl.maximum(SINKS, earliest - window + 1)
    if INVARIANT:
        for first in tl.range(lo // split_tokens * split_tokens, hi, split_tokens):
            other_peak, other_total, other_acc = no_keys(BLOCK_M, D_PAD)
            other_peak, other_total, other_acc = walk(
                q, other_peak, other_total, other_acc, first_key, last_key, tl.maximum(lo, first),
                tl.minimum(hi, first + split_tokens), pages, scale, soft_cap,
                True, BOUNDED, CAPPED, KV, FAST_WIDEN, D, BLOCK_SIZE, BLOCK_N,
            )  # fmt: skip
            peak, total, acc = merge(peak, total, acc, other_peak, other_total, other_acc)
    else:
        if not BOUNDED:
            # keys that every row sees need no mask
            full = tl.minimum(earliest + 1, hi) // BLOCK_N * BLOCK_N
            peak, total, acc = walk(
                q, peak, total, acc, first_key, last_key, 0, full, pages, scale, soft_cap,
                False, False, CAPPED, KV, FAST_WIDEN, D, BLOCK_SIZE, BLOCK_N,
            )  # fmt: skip
            lo = full
        peak, total, acc = walk(
            q, peak, total, acc, first_key, last_key, lo, hi, pages, scale, soft_cap,
            True, BOUNDED, CAPPED, KV, FAST_WIDEN, D, BLOCK_SIZE, BLOCK_N,
        )  # fmt: skip
    learned = peak
    if LEARNED:
        learned = tl.load(learned_ptr + head)
    out = finish(peak, total, acc, learned, LEARNED)
    cells = (token * heads + head)[:, None] * D + d[None, :]
    tl.store(out_ptr + cells, out.to(out_ptr.dtype.element_ty), mask=stored)
