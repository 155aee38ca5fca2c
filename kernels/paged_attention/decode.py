"""Attention of a few new tokens per sequence: keys are split over programs, then partial states merged.

A program is (KV head and tile of rows, split, sequence); it reads its keys once for all query heads that
share them. Grids come from host-known bounds, and programs beyond a sequence's keys leave at once, so both
kernels can be captured in a graph. Flash-decoding (Dao et al. 2023).

Slots of partial states: where there are sinks slot 0 is theirs, then come the splits in order of position.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .walk import Pages, finish, merge, no_keys, walk


@triton.jit
def spans(
    context,
    q_len,
    window,
    split_tokens,
    splits,
    BOUNDED: tl.constexpr,
    SINKS: tl.constexpr,
    INVARIANT: tl.constexpr,
):
    """First key behind the sinks, base of the first split and keys per split, for one sequence.

    Bounded: tokens see no keys before the last `window`, and sinks apart.
    Invariant: splits are `split_tokens` keys each. Otherwise what there is to read is dealt out evenly, in
    multiples of `split_tokens`. Splits begin at its multiples in both.
    """
    lo = 0
    if BOUNDED:
        lo = tl.maximum(SINKS, context - q_len - window + 1)
    base = lo // split_tokens * split_tokens
    size = split_tokens
    if not INVARIANT:
        size = tl.cdiv(tl.cdiv(context - base, splits), split_tokens) * split_tokens
    return lo, base, size


# what varies from step to step must not compile anew
@triton.jit(
    do_not_specialize=["window", "table_stride", "split_tokens", "splits", "slots"],
    do_not_specialize_on_alignment=["table_ptr", "query_start_ptr", "context_ptr"],
)
def decode_kernel(
    out_ptr,
    partial_ptr,
    weight_ptr,
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
    splits,
    slots,
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
    DIRECT: tl.constexpr,
    KV: tl.constexpr,
    FAST_WIDEN: tl.constexpr,
    GROUP: tl.constexpr,
    ROW_TILES: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Direct: out [tokens, heads, D]. Otherwise partial states, partial fp32 [tokens, heads, slots, D] and
    weight fp32 [tokens, heads, 2, slots] (peak, total).
    """
    kv_head, row_tile = tl.program_id(0) // ROW_TILES, tl.program_id(0) % ROW_TILES
    slot, seq = tl.program_id(1), tl.program_id(2)
    q_first = tl.load(query_start_ptr + seq)
    q_len = tl.load(query_start_ptr + seq + 1) - q_first
    context = tl.load(context_ptr + seq)
    lo, base, size = spans(context, q_len, window, split_tokens, splits, BOUNDED, SINKS, INVARIANT)
    first = base + (slot - 1 if SINKS > 0 else slot) * size
    # the sinks' slot begins before everybody's context, so it never leaves here
    if (first >= context) | (row_tile * BLOCK_M >= q_len * GROUP):
        return
    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    real = row < q_len * GROUP
    last_key = context - q_len + row // GROUP
    first_key = tl.maximum(SINKS, last_key - window + 1)
    end = tl.minimum(context, context - q_len + (row_tile * BLOCK_M + BLOCK_M - 1) // GROUP + 1)
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
    q_cells = token * q_stride + head * D
    lo, hi = tl.maximum(lo, first), tl.minimum(end, first + size)
    if SINKS > 0:  # noqa: SIM102 - known when compiling, the slot is not
        if slot == 0:
            q_cells, q_ptr = token * q_sink_stride + head * D, q_sink_ptr
            lo, hi = 0, tl.minimum(end, SINKS)
            first_key, last_key = tl.zeros_like(first_key), tl.minimum(last_key, SINKS - 1)
    q = tl.load(q_ptr + q_cells[:, None] + d[None, :], mask=stored, other=0)
    peak, total, acc = no_keys(BLOCK_M, D_PAD)
    peak, total, acc = walk(
        q, peak, total, acc, first_key, last_key, lo, hi, pages, scale, soft_cap,
        True, BOUNDED, CAPPED, KV, FAST_WIDEN, D, BLOCK_SIZE, BLOCK_N,
    )  # fmt: skip
    if DIRECT:
        learned = peak
        if LEARNED:
            learned = tl.load(learned_ptr + head)
        out = finish(peak, total, acc, learned, LEARNED)
        cells = (token * heads + head)[:, None] * D + d[None, :]
        tl.store(out_ptr + cells, out.to(out_ptr.dtype.element_ty), mask=stored)
    else:
        state = token * heads + head
        tl.store(partial_ptr + (state * slots + slot)[:, None] * D + d[None, :], acc, mask=stored)
        tl.store(weight_ptr + state * 2 * slots + slot, peak, mask=real)
        tl.store(weight_ptr + (state * 2 + 1) * slots + slot, total, mask=real)


@triton.jit(
    do_not_specialize=["window", "split_tokens", "splits", "slots"],
    do_not_specialize_on_alignment=["query_start_ptr", "context_ptr"],
)
def merge_kernel(
    out_ptr,
    partial_ptr,
    weight_ptr,
    query_start_ptr,
    context_ptr,
    learned_ptr,
    window,
    split_tokens,
    splits,
    slots,
    heads,
    BOUNDED: tl.constexpr,
    SINKS: tl.constexpr,
    LEARNED: tl.constexpr,
    INVARIANT: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
):
    """One token and head: its partial states in order of position → out [tokens, heads, D]."""
    head, i, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    q_first = tl.load(query_start_ptr + seq)
    q_len = tl.load(query_start_ptr + seq + 1) - q_first
    if i >= q_len:
        return
    context = tl.load(context_ptr + seq)
    _, base, size = spans(context, q_len, window, split_tokens, splits, BOUNDED, SINKS, INVARIANT)
    used = tl.cdiv(context - base, size)
    if SINKS > 0:
        used += 1
    state = (q_first + i).to(tl.int64) * heads + head
    d = tl.arange(0, D_PAD)
    one = tl.arange(0, 1)
    peak, total, acc = no_keys(1, D_PAD)
    for slot in tl.range(0, used, num_stages=4):
        other_peak = tl.load(weight_ptr + state * 2 * slots + slot + one)
        other_total = tl.load(weight_ptr + (state * 2 + 1) * slots + slot + one)
        cells = (state * slots + slot + one)[:, None] * D + d[None, :]
        other_acc = tl.load(partial_ptr + cells, mask=(d < D)[None, :], other=0)
        peak, total, acc = merge(peak, total, acc, other_peak, other_total, other_acc)
    learned = peak
    if LEARNED:
        learned = tl.load(learned_ptr + head + one)
    out = finish(peak, total, acc, learned, LEARNED)
    cells = (state + one)[:, None] * D + d[None, :]
    tl.store(out_ptr + cells, out.to(out_ptr.dtype.element_ty), mask=(d < D)[None, :])
