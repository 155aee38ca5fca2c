"""Binding of `cpu.cpp`: rotary embedding with the write to a cache in bf16, int8 or e4m3."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cpu.native import Kernels
from ..kv_cache.layout import NATIVE_FORMATS, KvCache

LANES = 16


def supports(qkv_THD: Tensor, kv: KvCache) -> bool:
    return (
        qkv_THD.device.type == "cpu"
        and qkv_THD.dtype == torch.bfloat16
        and qkv_THD.is_contiguous()
        and kv.values.dtype in NATIVE_FORMATS
        and qkv_THD.shape[2] % LANES == 0
    )


def rotary_store_cpu(
    kernels: Kernels,
    qkv_THD: Tensor,
    cos_sin_PR: Tensor,
    rows_T: Tensor,
    slots_T: Tensor,
    kv: KvCache,
    layer: int,
    sink_rows_T: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(q, q_sink): a view of qkv_THD, which is overwritten, and the queries turned by `sink_rows_T`."""
    T, all_heads, D = qkv_THD.shape
    heads = all_heads - 2 * kv.kv_heads
    values = kv.values[:, layer]
    scales = None if kv.scales is None else kv.scales[:, layer]
    q_sink_THD = None if sink_rows_T is None else qkv_THD.new_empty(T, heads, D)
    kernels.df_rotary_store(
        qkv_THD.data_ptr(),
        cos_sin_PR.data_ptr(),
        rows_T.data_ptr(),
        slots_T.data_ptr(),
        values.data_ptr(),
        None if scales is None else scales.data_ptr(),
        None if sink_rows_T is None else sink_rows_T.data_ptr(),
        None if q_sink_THD is None else q_sink_THD.data_ptr(),
        *(T, heads, kv.kv_heads, D, cos_sin_PR.shape[1]),
        NATIVE_FORMATS[values.dtype],
        values.stride(0),
        0 if scales is None else scales.stride(0),
        kv.block_size,
    )
    return qkv_THD[:, :heads], q_sink_THD
