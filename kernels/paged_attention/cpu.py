"""Binding of `cpu.cpp`: paged attention in bf16 on CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cpu.native import Kernels
from ..kv_cache.layout import KvCache
from .metadata import AttentionMetadata

HEAD_SIZES = (32, 64, 80, 96, 128, 256)
BLOCK_SIZE = 16


def supports(q_THD: Tensor, kv: KvCache) -> bool:
    return (
        q_THD.device.type == "cpu"
        and q_THD.dtype == kv.values.dtype == torch.bfloat16
        and kv.block_size == BLOCK_SIZE
        and q_THD.shape[2] in HEAD_SIZES
    )


def paged_attention_cpu(
    kernels: Kernels, q_THD: Tensor, kv: KvCache, layer: int, meta: AttentionMetadata, scale: float
) -> Tensor:
    T, heads, D = q_THD.shape
    assert q_THD.stride()[1:] == (D, 1), "the heads of a token must lie side by side"
    values = kv.values[:, layer]
    out_THD = torch.empty((T, heads, D), dtype=q_THD.dtype)
    failed = kernels.df_paged_attention(
        q_THD.data_ptr(),
        values.data_ptr(),
        out_THD.data_ptr(),
        meta.block_table_BM.data_ptr(),
        meta.query_start_B1.data_ptr(),
        meta.positions_T.data_ptr(),
        meta.block_table_BM.shape[0],
        meta.block_table_BM.shape[1],
        values.stride(0),
        heads,
        kv.kv_heads,
        D,
        q_THD.stride(0),
        scale,
    )
    assert not failed, f"no kernel for head size {D}"
    return out_THD
