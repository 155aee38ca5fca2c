"""Binding of `cpu.cpp`: paged attention on CPU, queries in bf16, the cache in bf16, int8 or e4m3."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cpu.native import Kernels
from ..kv_cache.layout import NATIVE_FORMATS, KvCache
from .metadata import PLAIN, AttentionMetadata, AttentionOptions

LANES = 16
LARGEST_HEAD = 256
BLOCK_SIZE = 16


def supports(q_THD: Tensor, kv: KvCache) -> bool:
    D = q_THD.shape[2]
    return (
        q_THD.device.type == "cpu"
        and q_THD.dtype == torch.bfloat16
        and kv.values.dtype in NATIVE_FORMATS
        and kv.block_size == BLOCK_SIZE
        and D % LANES == 0
        and D <= LARGEST_HEAD
    )


def paged_attention_cpu(
    kernels: Kernels,
    q_THD: Tensor,
    kv: KvCache,
    layer: int,
    meta: AttentionMetadata,
    scale: float,
    options: AttentionOptions = PLAIN,
    q_sink_THD: Tensor | None = None,
) -> Tensor:
    T, heads, D = q_THD.shape
    values = kv.values[:, layer]
    scales = None if kv.scales is None else kv.scales[:, layer]
    out_THD = torch.empty((T, heads, D), dtype=q_THD.dtype)
    kernels.df_paged_attention(
        _heads_together(q_THD),
        None if q_sink_THD is None else _heads_together(q_sink_THD),
        values.data_ptr(),
        None if scales is None else scales.data_ptr(),
        out_THD.data_ptr(),
        meta.block_table_BM.data_ptr(),
        meta.query_start_B1.data_ptr(),
        meta.positions_T.data_ptr(),
        None if options.sink_logits_H is None else options.sink_logits_H.data_ptr(),
        *meta.block_table_BM.shape,
        NATIVE_FORMATS[values.dtype],
        values.stride(0),
        0 if scales is None else scales.stride(0),
        *(heads, kv.kv_heads, D),
        q_THD.stride(0),
        0 if q_sink_THD is None else q_sink_THD.stride(0),
        options.window or 0,
        options.sinks,
        scale,
        options.soft_cap or 0.0,
    )
    return out_THD


def _heads_together(q_THD: Tensor) -> int:
    assert q_THD.stride()[1:] == (q_THD.shape[2], 1), "the heads of a token must lie side by side"
    return q_THD.data_ptr()
