"""Moving keys and values into and between blocks of the paged cache.

A slot is block·block_size + offset; slabs are whole blocks, [blocks, ...] of any dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .layout import KvCache

# the largest number of each quantised format
LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
TINIEST = 1e-10


def store_kv(k_THD: Tensor, v_THD: Tensor, kv: KvCache, layer: int, slots_T: Tensor) -> None:
    """Writes one layer's new keys and values [tokens, kv_heads, head_dim] to their slots, in place."""
    blocks_T, offsets_T = slots_T // kv.block_size, slots_T % kv.block_size
    for kind, x_THD in enumerate((k_THD, v_THD)):
        if kv.scales is not None:
            x_THD, scale_TH = quantise(x_THD, kv.values.dtype)
            kv.scales[blocks_T, layer, kind, :, offsets_T] = scale_TH
        kv.values[blocks_T, layer, kind, :, offsets_T] = x_THD


def quantise(x_THD: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Numbers of `dtype` [T, H, D] and their fp32 scales [T, H], x ≈ number · scale, half to even."""
    x_THD = x_THD.float()
    limit = LIMITS[dtype]
    scale_TH = x_THD.abs().amax(-1).clamp(min=TINIEST) / limit
    scaled = x_THD / scale_TH.unsqueeze(-1)
    return (scaled.round() if dtype == torch.int8 else scaled).clamp(-limit, limit).to(dtype), scale_TH


def copy_blocks(slabs: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copies whole slabs, in place; no block is both source and target."""
    slabs[targets] = slabs[sources]


def gather_blocks(slabs: Tensor, blocks: Tensor, out: Tensor) -> None:
    """Slabs of these blocks side by side into out [len(blocks), ...]."""
    out.copy_(slabs[blocks])


def scatter_blocks(staged: Tensor, slabs: Tensor, blocks: Tensor) -> None:
    """The inverse: staged [len(blocks), ...] to these blocks, in place."""
    slabs[blocks] = staged
