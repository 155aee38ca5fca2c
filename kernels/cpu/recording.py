"""Native calls recorded once and run again in one call: what CUDA graphs are to a GPU.

Between two kernels of a decode step Python takes longer than many of the kernels do. A recording holds
addresses, so whoever replays it puts new inputs where the old ones were. Tensors made while recording come
from memory that several recordings share: their replays follow one another. Knows nothing of what it records.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .native import Kernel, Kernels, library

ALIGNMENT = 64
_ALLOCATIONS = ("aten::empty", "aten::new_empty", "aten::empty_like")
# the library is the process's, so only one recording can listen to its calls
_one_at_a_time = threading.Lock()


def can_record(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the steps of a model in this dtype can be recorded: as CUDA graphs, or by `record`."""
    return device.type == "cuda" or (dtype == torch.bfloat16 and library() is not None)


def record(run: Callable[[], Tensor], memory: Memory) -> tuple[Tensor, Program | None]:
    """Run on a CPU → what `run` returns, and what computes it again in the same place, from inputs that were
    put where they are now; None where not everything in it can be repeated.

    memory: holds what is made in between; those that share it must not be replayed at the same time.
    """
    kernels = library()
    if kernels is None:
        return run(), None
    with _one_at_a_time, Recording(kernels, memory) as recording:
        output = run()
    return output, recording.program() if recording.whole else None


class Memory:
    """Blocks for tensors that live during recordings, and again during their replays."""

    def __init__(self) -> None:
        self._free: dict[int, list[NDArray[np.uint8]]] = defaultdict(list)

    def like(self, tensor: Tensor) -> Tensor:
        """Uninitialised, of the same shape and type; its block goes back when its storage is gone."""
        size = -(-max(tensor.nbytes, 1) // ALIGNMENT) * ALIGNMENT
        free = self._free[size]
        block = free.pop() if free else _aligned(size)
        lent = block[: max(tensor.nbytes, 1)]
        weakref.finalize(lent, free.append, block)
        # the storage owns `lent`: it lives as long as any view of the tensor
        return torch.from_numpy(lent)[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


class Recording(TorchDispatchMode):
    """Everything that runs within is done, and the native calls among it are kept.

    whole: nothing but native calls, allocations and views ran, so that a replay repeats all of it.
    """

    def __init__(self, kernels: Kernels, memory: Memory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.whole = True
        self._kernels = kernels
        self._memory = memory
        self._calls: list[tuple[Kernel, bytes]] = []

    def __enter__(self) -> Recording:
        thread = threading.get_ident()

        def keep(kernel: Kernel, arguments: tuple[int | float | None, ...]) -> None:
            # another thread's calls are none of this recording's
            if threading.get_ident() == thread:
                self._calls.append((kernel, kernel.pack(arguments)))

        self._kernels.on_call = keep
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._kernels.on_call = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.name().split(".")[0] in _ALLOCATIONS:
            return self._memory.like(result)
        self.whole = self.whole and func.is_view
        return result

    def program(self) -> Program:
        return Program(self._kernels, self._calls)


class Program:
    """Recorded calls. names: the kernel of each; calling it runs them all, in their order."""

    def __init__(self, kernels: Kernels, calls: list[tuple[Kernel, bytes]]) -> None:
        self.names = [kernel.name for kernel, _ in calls]
        self._replay = kernels.replay
        # of each call: the kernel's address, and that of its arguments
        self._words = np.frombuffer(b"".join(packed for _, packed in calls), dtype=np.uint64)
        ends = np.cumsum([len(packed) for _, packed in calls], dtype=np.uint64)
        sizes = np.array([len(packed) for _, packed in calls], dtype=np.uint64)
        addresses = np.array([kernel.packed_address for kernel, _ in calls], dtype=np.uint64)
        self._calls = np.stack((addresses, ends - sizes + np.uint64(self._words.ctypes.data)), axis=1)

    def __call__(self) -> None:
        self._replay(self._calls.ctypes.data, len(self._calls))

    def run_one(self, index: int) -> None:
        """A single one of the calls, for whoever wants to time it."""
        self._replay(self._calls[index].ctypes.data, 1)


def _aligned(size: int) -> NDArray[np.uint8]:
    raw = np.empty(size + ALIGNMENT, dtype=np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size]
