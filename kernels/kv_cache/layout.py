"""Where a block's bytes are: one contiguous slab per block, all layers in it, scales too.

    slab = values  [layers, 2, kv_heads, block_size, head_dim]   in the cache's dtype
         + scales  [layers, kv_heads, 2, block_size] fp32        quantised caches only
         + padding to SLAB_ALIGN bytes

A key or value is stored number · scale of its token and head. Scales lie behind all values, so that every
tile of values keeps its alignment, and a head's scales of keys and values share one line (16 tokens).
Moving a block anywhere is one copy of `slab_bytes`. Knows bytes; knows nothing of who owns a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..cpu import arena

SLAB_ALIGN = 128
QUANTISED = (torch.int8, torch.float8_e4m3fn)
# by what number the C++ kernels know what they can read and write
NATIVE_FORMATS = {torch.bfloat16: 0, torch.int8: 1, torch.float8_e4m3fn: 2}


@dataclass(frozen=True)
class KvCache:
    """One pool, as bytes and as numbers; all three share memory.

    slabs: uint8 [blocks, slab_bytes]. values: [blocks, layers, 2, kv_heads, block_size, head_dim].
    scales: fp32 [blocks, layers, 2, kv_heads, block_size], None where values are not quantised.
    """

    slabs: Tensor
    values: Tensor
    scales: Tensor | None

    @property
    def kv_heads(self) -> int:
        return self.values.shape[3]

    @property
    def block_size(self) -> int:
        return self.values.shape[4]


@dataclass(frozen=True)
class KvLayout:
    layers: int
    kv_heads: int
    block_size: int
    head_dim: int
    dtype: torch.dtype

    @property
    def quantised(self) -> bool:
        return self.dtype in QUANTISED

    @property
    def value_bytes(self) -> int:
        return self.rows * self.head_dim * self.dtype.itemsize

    @property
    def scale_bytes(self) -> int:
        return self.rows * torch.float32.itemsize if self.quantised else 0

    @property
    def rows(self) -> int:
        """Keys and values of a block: vectors of head_dim numbers."""
        return self.layers * 2 * self.kv_heads * self.block_size

    @property
    def slab_bytes(self) -> int:
        return -(-(self.value_bytes + self.scale_bytes) // SLAB_ALIGN) * SLAB_ALIGN

    def allocate(self, blocks: int, device: torch.device) -> KvCache:
        # zeros, since masked keys are multiplied by weight 0, which NaN would survive
        shape = (blocks, self.slab_bytes)
        if device.type == "cpu":
            return self.view(arena.zeros(shape, torch.uint8))
        return self.view(torch.zeros(shape, dtype=torch.uint8, device=device))

    def view(self, slabs: Tensor) -> KvCache:
        """Numbers in slabs, uint8 [blocks, slab_bytes]."""
        numbers = (self.layers, 2, self.kv_heads, self.block_size, self.head_dim)
        values = slabs[:, : self.value_bytes].view(self.dtype).unflatten(1, numbers)
        if not self.quantised:
            return KvCache(slabs, values, None)
        scales = slabs[:, self.value_bytes : self.value_bytes + self.scale_bytes].view(torch.float32)
        of_heads = (self.layers, self.kv_heads, 2, self.block_size)
        return KvCache(slabs, values, scales.unflatten(1, of_heads).transpose(2, 3))
