"""Moving keys and values into and between blocks of the paged cache.

Shapes: kv [blocks, layers, 2, kv_heads, block_size, head_dim]; a slot is block·block_size + offset.
"""

from __future__ import annotations

from torch import Tensor


def store_kv(k_THD: Tensor, v_THD: Tensor, kv: Tensor, layer: int, slots_T: Tensor) -> None:
    """Writes one layer's new keys and values [tokens, kv_heads, head_dim] to their slots, in place."""
    block_size = kv.shape[4]
    blocks_T, offsets_T = slots_T // block_size, slots_T % block_size
    kv[blocks_T, layer, 0, :, offsets_T] = k_THD
    kv[blocks_T, layer, 1, :, offsets_T] = v_THD


def copy_blocks(kv: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copies whole slabs (all layers), in place; no block is both source and target."""
    kv[targets] = kv[sources]
