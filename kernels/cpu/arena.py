"""Memory for weights and KV, which are streamed once per token: in huge pages where the kernel gives them.

A step reads all weights, so that with pages of 4 KiB address translation takes a good part of the time.
Weights are carved from a few large mappings, since one weight alone may not fill a huge page.
"""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
CHUNK = 64 << 20
ALIGNMENT = 64


class Arena:
    """Tensors keep their mapping alive; memory goes back when the last one of it is gone.

    chunk: bytes that are mapped at least; what nobody touches takes no memory.
    """

    def __init__(self, chunk: int = CHUNK) -> None:
        self._chunk = chunk
        self._mapping: mmap.mmap | None = None
        self._next = self._end = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zero-filled, 64-byte aligned."""
        count = torch.Size(shape).numel()
        size = max(count * dtype.itemsize, 1)
        if self._mapping is None or self._next + size > self._end:
            self._map(max(size, self._chunk))
        assert self._mapping is not None
        tensor = torch.frombuffer(self._mapping, dtype=dtype, count=count, offset=self._next).view(shape)
        self._next += -(-size // ALIGNMENT) * ALIGNMENT
        return tensor

    def _map(self, size: int) -> None:
        size = -(-size // HUGE_PAGE) * HUGE_PAGE
        mapping = mmap.mmap(-1, size + HUGE_PAGE)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            mapping.madvise(mmap.MADV_HUGEPAGE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self._mapping = mapping
        self._next = -address % HUGE_PAGE
        self._end = self._next + size


weights_arena = Arena()


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor with memory of its own, given back with it."""
    if torch.Size(shape).numel() * dtype.itemsize < HUGE_PAGE:
        return torch.zeros(shape, dtype=dtype)
    return Arena(chunk=0).empty(shape, dtype)
