"""Slabs in host memory: page-aligned, so that a disk reads and writes them directly, and pinned for a GPU.

Torch's own pinned memory is rounded up to a power of two, half of it lost at worst; so the pages are ours,
and CUDA is told of them. Knows nothing of what a slab holds.
"""

from __future__ import annotations

import logging
import mmap
from contextlib import suppress

import torch
from torch import Tensor

from .slab_file import PAGE

log = logging.getLogger(__name__)


class HostMemory:
    """slots · slab_bytes, each slot on pages of its own."""

    def __init__(self, slots: int, slab_bytes: int, device: torch.device) -> None:
        """Raises OSError where the address space cannot be had."""
        self.slab_bytes = slab_bytes
        self._stride = -(-slab_bytes // PAGE) * PAGE
        memory = mmap.mmap(-1, max(slots, 1) * self._stride)
        # not every kernel has them
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._view = memoryview(memory)
        self._slabs = torch.frombuffer(memory, dtype=torch.uint8).view(-1, self._stride)
        self._pinned = device.type == "cuda" and self._pin()

    def slab(self, slot: int) -> Tensor:
        """uint8 [slab_bytes]."""
        return self._slabs[slot, : self.slab_bytes]

    def pages(self, slot: int) -> memoryview:
        """The whole pages of a slot."""
        return self._view[slot * self._stride : (slot + 1) * self._stride]

    def close(self) -> None:
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._slabs.data_ptr())
            self._pinned = False

    def _pin(self) -> bool:
        status = torch.cuda.cudart().cudaHostRegister(self._slabs.data_ptr(), self._slabs.numel(), 0)
        if int(status) != 0:
            log.warning("host memory for KV blocks could not be pinned (%s): copies are slower", status)
        return int(status) == 0
