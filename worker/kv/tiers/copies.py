"""Copies of slabs between the main pool and host memory, ordered against the steps that use them.

On CUDA they run on streams of their own: a copy starts after the steps that were submitted before its fence
(they write what it reads, or still read what it overwrites), and a step that reads a copied slab is submitted
only after the copy has ended. On CPU steps run in the engine's thread, so that each is over when a copy is
asked for, or waits for its end. Knows nothing of names and slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

Pairs = Sequence[tuple[int, Tensor]]
"""Blocks of the pool, and host slabs uint8 [slab_bytes]."""

Fence = torch.cuda.Event | None
"""After all steps that were submitted before it; None where the host is the device."""


class Copies:
    """slabs: the main pool, uint8 [blocks, slab_bytes]."""

    def __init__(self, slabs: Tensor) -> None:
        self._slabs = slabs
        self._streams = (
            (torch.cuda.Stream(slabs.device), torch.cuda.Stream(slabs.device)) if slabs.is_cuda else None
        )

    @property
    def device(self) -> torch.device:
        return self._slabs.device

    @property
    def blocks(self) -> int:
        return self._slabs.shape[0]

    @property
    def slab_bytes(self) -> int:
        return self._slabs.shape[1]

    def fence(self) -> Fence:
        """Call it in the thread that submits steps."""
        if self._streams is None:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def save(self, pairs: Pairs, fence: Fence) -> None:
        """Blocks to host slabs; they are there when it returns. Any thread."""
        ended = self._enqueue(pairs, fence, to_host=True)
        if ended is not None:
            ended.synchronize()

    def load(self, pairs: Pairs, fence: Fence) -> None:
        """Host slabs to blocks; they are there when it returns. Any thread."""
        ended = self._enqueue(pairs, fence, to_host=False)
        if ended is not None:
            ended.synchronize()

    def save_before_next_step(self, pairs: Pairs) -> Fence:
        """As `save`, but the device alone waits: steps submitted from now on run after it.

        Returns what the host has to wait for before it reads the slabs. Thread of the steps.
        """
        ended = self._enqueue(pairs, self.fence(), to_host=True)
        if ended is not None:
            torch.cuda.current_stream(self._slabs.device).wait_event(ended)
        return ended

    def _enqueue(self, pairs: Pairs, fence: Fence, *, to_host: bool) -> Fence:
        if self._streams is None:
            for block, slab in pairs:
                # torch would wake its pool of threads for each, which fight with the step's own
                inside, outside = self._slabs[block].numpy(), slab.numpy()
                np.copyto(outside, inside) if to_host else np.copyto(inside, outside)
            return None
        with torch.cuda.stream(self._streams[0 if to_host else 1]):
            stream = torch.cuda.current_stream(self._slabs.device)
            if fence is not None:
                stream.wait_event(fence)
            for block, slab in pairs:
                if to_host:
                    slab.copy_(self._slabs[block], non_blocking=True)
                else:
                    self._slabs[block].copy_(slab, non_blocking=True)
            ended = torch.cuda.Event(blocking=True)
            ended.record(stream)
        return ended
