"""Moving keys and values into and between blocks of the paged cache.

Shapes: kv [blocks, layers, 2, kv_heads, block_size, head_dim]; kv_scales fp32, the same without the last, for
quantised caches; a slot is block·block_size + offset.
"""

from __future__ import annotations

import torch
from torch import Tensor

# the largest number of each quantised format
LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
TINIEST = 1e-10


def store_kv(
    k_THD: Tensor, v_THD: Tensor, kv: Tensor, layer: int, slots_T: Tensor, kv_scales: Tensor | None = None
) -> None:
    """Writes one layer's new keys and values [tokens, kv_heads, head_dim] to their slots, in place."""
    block_size = kv.shape[4]
    blocks_T, offsets_T = slots_T // block_size, slots_T % block_size
    for kind, x_THD in enumerate((k_THD, v_THD)):
        if kv_scales is not None:
            x_THD, scale_TH = quantise(x_THD, kv.dtype)
            kv_scales[blocks_T, layer, kind, :, offsets_T] = scale_TH
        kv[blocks_T, layer, kind, :, offsets_T] = x_THD


def quantise(x_THD: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Numbers of `dtype` [T, H, D] and their fp32 scales [T, H], x ≈ number · scale, half to even."""
    x_THD = x_THD.float()
    limit = LIMITS[dtype]
    scale_TH = x_THD.abs().amax(-1).clamp(min=TINIEST) / limit
    scaled = x_THD / scale_TH.unsqueeze(-1)
    return (scaled.round() if dtype == torch.int8 else scaled).clamp(-limit, limit).to(dtype), scale_TH


def copy_blocks(kv: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copies whole slabs (all layers), in place; no block is both source and target."""
    kv[targets] = kv[sources]


def gather_blocks(kv: Tensor, blocks: Tensor, out: Tensor) -> None:
    """Slabs of these blocks side by side into out [len(blocks), ...]."""
    out.copy_(kv[blocks])


def scatter_blocks(slabs: Tensor, kv: Tensor, blocks: Tensor) -> None:
    """The inverse: slabs [len(blocks), ...] to these blocks of kv, in place."""
    kv[blocks] = slabs
