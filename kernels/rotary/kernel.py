"""Rotary embedding with the write to the paged cache, in Triton. Formula and shapes: see `reference.py`.

One launch turns queries and keys, and writes keys and values to their slots, quantised where the cache is:
int8 or e4m3 bits made by integer operations (not every chip has the type), an fp32 scale per token and head.
What is stored equals the reference bit for bit where the rotation does; its tolerance is one rounding.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kv_cache.layout import KvCache, KvLayout
from ..kv_cache.reference import LIMITS, TINIEST
from ..launch import launch

HEADS_AT_ONCE = 8


@triton.jit
def round_to_int8(x):
    """To the nearest, half to even; |x| ≤ 127."""
    # at 1.5·2²³ the last bit of a float is one
    return ((x + 12582912.0) - 12582912.0).to(tl.int8)


@triton.jit
def round_to_e4m3(x):
    """Bits of the nearest e4m3 number, half to even, as int8; |x| ≤ 448."""
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # exponents rebiased from 127 to 7; three bits of the mantissa stay
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # at 2¹⁴ the last bit of a float is 2⁻⁹, the step of the subnormal numbers
    subnormal = (tl.abs(x) + 16384.0).to(tl.uint32, bitcast=True) & 0xF
    rounded = tl.where(magnitude < 0x3C800000, subnormal, normal)
    return (rounded | ((bits >> 24) & 0x80)).to(tl.int8, bitcast=False)


@triton.jit
def _quantise(x, factor, FORMAT: tl.constexpr):
    scaled = tl.div_rn(x, factor + tl.zeros_like(x))
    if FORMAT == "int8":
        return round_to_int8(scaled)
    return round_to_e4m3(scaled)


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slots_ptr", "sink_positions_ptr"])
def _rotary_store_kernel(
    qkv_ptr,
    cos_sin_ptr,
    positions_ptr,
    slots_ptr,
    values_ptr,
    scales_ptr,
    sink_positions_ptr,
    q_sink_ptr,
    heads,
    kv_heads,
    block_stride,
    scale_block_stride,
    block_size,
    limit,
    tiniest,
    D: tl.constexpr,
    R: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    all_heads = heads + 2 * kv_heads
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    column = tl.arange(0, BLOCK_R)[None, :]
    half: tl.constexpr = R // 2
    inside = (head < all_heads) & (column < half)
    row_ptrs = qkv_ptr + token * (all_heads * D) + head * D
    qkv_ptrs = row_ptrs + column
    first = tl.load(qkv_ptrs, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(qkv_ptrs + half, mask=inside, other=0.0).to(tl.float32)
    angle_ptrs = cos_sin_ptr + tl.load(positions_ptr + token) * R + column
    cos = tl.load(angle_ptrs, mask=column < half, other=0.0)
    sin = tl.load(angle_ptrs + half, mask=column < half, other=0.0)
    turned = head < heads + kv_heads
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    y_first = tl.where(turned, first * cos - second * sin, first).to(dtype)
    y_second = tl.where(turned, second * cos + first * sin, second).to(dtype)
    query = inside & (head < heads)
    tl.store(qkv_ptrs, y_first, mask=query)
    tl.store(qkv_ptrs + half, y_second, mask=query)
    if R < D:
        rest_column = tl.arange(0, BLOCK_REST)[None, :]
        rest_inside = (head < all_heads) & (rest_column < D - R)
        rest = tl.load(row_ptrs + R + rest_column, mask=rest_inside, other=0.0)
    if sink_positions_ptr is not None:
        angle_ptrs = cos_sin_ptr + tl.load(sink_positions_ptr + token) * R + column
        cos = tl.load(angle_ptrs, mask=column < half, other=0.0)
        sin = tl.load(angle_ptrs + half, mask=column < half, other=0.0)
        sink_row_ptrs = q_sink_ptr + token * (heads * D) + head * D
        sink_ptrs = sink_row_ptrs + column
        tl.store(sink_ptrs, (first * cos - second * sin).to(dtype), mask=query)
        tl.store(sink_ptrs + half, (second * cos + first * sin).to(dtype), mask=query)
        if R < D:
            tl.store(sink_row_ptrs + R + rest_column, rest, mask=rest_inside & (head < heads))
    # row of the block's [2, kv_heads, block_size]: keys first, then values
    slot = tl.load(slots_ptr + token)
    block, offset = slot // block_size, slot % block_size
    kv_head = head - heads
    row = kv_head * block_size + offset
    stored = (head >= heads) & (head < all_heads)
    value_row_ptrs = values_ptr + block * block_stride + row * D
    value_ptrs = value_row_ptrs + column
    if FORMAT is None:
        tl.store(value_ptrs, y_first, mask=inside & stored)
        tl.store(value_ptrs + half, y_second, mask=inside & stored)
        if R < D:
            tl.store(value_row_ptrs + R + rest_column, rest, mask=rest_inside & stored)
    else:
        y_first, y_second = y_first.to(tl.float32), y_second.to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(y_first), axis=1), tl.max(tl.abs(y_second), axis=1))
        if R < D:
            rest = rest.to(tl.float32)
            largest = tl.maximum(largest, tl.max(tl.abs(rest), axis=1))
        largest = tl.maximum(largest, tiniest)
        factor = tl.div_rn(largest, limit + tl.zeros_like(largest))[:, None]
        tl.store(value_ptrs, _quantise(y_first, factor, FORMAT), mask=inside & stored)
        tl.store(value_ptrs + half, _quantise(y_second, factor, FORMAT), mask=inside & stored)
        if R < D:
            rest_ptrs = value_row_ptrs + R + rest_column
            tl.store(rest_ptrs, _quantise(rest, factor, FORMAT), mask=rest_inside & stored)
        # a head's scales of keys and values lie together: [kv_heads, 2, block_size]
        kind = (kv_head >= kv_heads).to(tl.int32)
        scale_row = ((kv_head - kind * kv_heads) * 2 + kind) * block_size + offset
        tl.store(scales_ptr + block * scale_block_stride + scale_row, factor, mask=stored)


def rotary_store_triton(
    qkv_THD: Tensor,
    cos_sin_PR: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    kv: KvCache,
    layer: int,
    sink_positions_T: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """As the reference → (q, q_sink), q being a view of qkv_THD, which is contiguous and overwritten.

    q_sink [tokens, heads, head_dim]: the queries turned by `sink_positions_T` instead, None without them.
    """
    T, all_heads, D = qkv_THD.shape
    heads, R = all_heads - 2 * kv.kv_heads, cos_sin_PR.shape[1]
    values, scales = kv.values[:, layer], None
    if kv.scales is not None:
        values, scales = values.view(torch.int8), kv.scales[:, layer]
    q_sink_THD = None if sink_positions_T is None else qkv_THD.new_empty(T, heads, D)
    launch(
        _rotary_store_kernel,
        (T, triton.cdiv(all_heads, HEADS_AT_ONCE)),
        *(qkv_THD, cos_sin_PR, positions_T, slots_T, values, scales),
        *(sink_positions_T, q_sink_THD, heads, kv.kv_heads, values.stride(0)),
        *(
            0 if scales is None else scales.stride(0),
            kv.block_size,
            LIMITS.get(kv.values.dtype, 1.0),
            TINIEST,
        ),
        D=D,
        R=R,
        FORMAT={torch.int8: "int8", torch.float8_e4m3fn: "fp8"}.get(kv.values.dtype),
        BLOCK_H=HEADS_AT_ONCE,
        BLOCK_R=triton.next_power_of_2(R // 2),
        BLOCK_REST=triton.next_power_of_2(max(D - R, 1)),
        num_warps=4,
    )
    return qkv_THD[:, :heads], q_sink_THD


def _example(
    D: int, dtype: torch.dtype, *, R: int | None = None, sinks: bool = False, kv_heads: int = 8
) -> None:
    layout = KvLayout(layers=32, kv_heads=kv_heads, block_size=16, head_dim=D, dtype=dtype)
    cache = layout.view(torch.empty((64, layout.slab_bytes), dtype=torch.uint8, device="meta"))
    index = torch.empty(8, dtype=torch.int64, device="meta")
    qkv_THD = torch.empty((8, 32 + 2 * kv_heads, D), dtype=torch.bfloat16, device="meta")
    angles = torch.empty((4096, R or D), device="meta")
    rotary_store_triton(qkv_THD, angles, index, index, cache, 1, index if sinks else None)


_BF16, _INT8, _FP8 = torch.bfloat16, torch.int8, torch.float8_e4m3fn
VARIANTS: dict[str, Callable[[], None]] = {
    "128": lambda: _example(128, _BF16),
    "128, sinks": lambda: _example(128, _BF16, sinks=True),
    "128, int8": lambda: _example(128, _INT8),
    "128, fp8": lambda: _example(128, _FP8),
    "256, one KV head, int8": lambda: _example(256, _INT8, kv_heads=1),
    "80 of which 32 turn, fp8": lambda: _example(80, _FP8, R=32),
}
