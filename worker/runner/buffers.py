"""The way to the device and back: one packed copy of a step's arrays, and results that arrive later.

Nothing here waits for the device but `HostCopy.wait`. Knows bytes and shapes, not what they mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]

# of every array in the buffer: the widest vector load
ALIGNMENT = 16

_DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
}


class Staging:
    """Carries arrays to a buffer on the device that stays where it is, so that a graph can read from it.

    Arrays are laid side by side in their order: as long as the shapes before it are the same, an array lands
    at the same address. What does not fit the capacity travels alone, to memory of its own.
    """

    def __init__(self, capacity: int, device: torch.device, *, depth: int) -> None:
        """capacity: bytes. depth: steps in flight; each of them has a staging area on the host of its own."""
        self._capacity = -(-capacity // ALIGNMENT) * ALIGNMENT
        self._device = torch.empty(self._capacity, dtype=torch.uint8, device=device)
        # most of a step's arrays are empty
        self._nothing = {key: torch.empty(0, dtype=dtype, device=device) for key, dtype in _DTYPES.items()}
        self._on_host = device.type == "cpu"
        areas = [self._device] if self._on_host else [self._pinned(self._capacity) for _ in range(depth)]
        self._areas = [_Area(area, device) for area in areas]
        self._turn = 0

    def send(self, arrays: Sequence[Array]) -> list[Tensor]:
        """Tensors on the device with the values of `arrays` (contiguous), valid until the next send."""
        area = self._areas[self._turn]
        self._turn = (self._turn + 1) % len(self._areas)
        area.wait()
        end, tensors = 0, []
        for array in arrays:
            if not array.size:
                nothing = self._nothing[array.dtype]
                tensors.append(nothing if array.ndim == 1 else nothing.view(array.shape))
                continue
            start = -(-end // ALIGNMENT) * ALIGNMENT
            if start + array.nbytes > self._capacity:
                tensors.append(self._send_alone(array))
                continue
            end = start + array.nbytes
            area.bytes[start:end] = array.reshape(-1).view(np.uint8)
            tensors.append(self._device[start:end].view(_DTYPES[array.dtype]).view(array.shape))
        if not self._on_host:
            self._device[:end].copy_(area.tensor[:end], non_blocking=True)
            area.mark()
        return tensors

    def _send_alone(self, array: Array) -> Tensor:
        return send(torch.from_numpy(array), self._device.device)

    @staticmethod
    def _pinned(size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)


class _Area:
    """A staging area on the host, and the event after the last copy from it."""

    def __init__(self, tensor: Tensor, device: torch.device) -> None:
        self.tensor = tensor
        self.bytes: NDArray[np.uint8] = tensor.numpy()
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def wait(self) -> None:
        """The copy was made long ago unless more steps are in flight than there are areas."""
        if self._copied is not None:
            self._copied.synchronize()

    def mark(self) -> None:
        if self._copied is not None:
            self._copied.record()


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor from the host, without waiting for the device; for what does not travel with a step."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """Tensors on their way to the host, behind the work that makes them."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        self._arrived = None
        if any(tensor.is_cuda for tensor in self._tensors):
            self._tensors = [self._start(tensor) for tensor in self._tensors]
            # sleeping beats spinning: the I/O thread shares the cores, and the next step runs meanwhile
            self._arrived = torch.cuda.Event(blocking=True)
            self._arrived.record()

    def wait(self) -> list[Tensor]:
        """The tensors on the host; blocks until they are there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._tensors

    @staticmethod
    def _start(tensor: Tensor) -> Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)
