"""Weights by name, checked against the shape the model wants: from safetensors, or random for benchmarks.

Never pickle. Knows nothing of architectures.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from ..assets.checkpoint import tensor_index
from ..assets.errors import ModelError
from ..assets.quantised import SUPPORTED
from ..parallel.shard import Part

# read between two of the C library's clean-ups
TRIM_BYTES = 32 << 20

_FLOATS = ("BF16", "F16", "F32")


class Weights(Protocol):
    """dtype: of all that it gives. folder: where it is from; None where it is made up."""

    dtype: torch.dtype
    folder: Path | None

    def has(self, name: str) -> bool: ...

    def take(self, name: str, *shape: int, part: Part | None = None) -> Tensor:
        """The tensor, or part of it, on the model's device in the model's dtype.

        shape: of what is returned. Raises ModelError naming what is wrong.
        """


class CheckpointWeights:
    """Reads one tensor after the other, so that the peak is the model and one tensor.

    nbytes: read so far, in the checkpoint's dtype.
    """

    def __init__(
        self, folder: Path, dtype: torch.dtype, device: torch.device, on_bytes: Callable[[int, int], None]
    ) -> None:
        self.folder: Path | None = folder
        self.dtype = dtype
        self.device = device
        self._on_bytes = on_bytes
        self._index = tensor_index(folder)
        self._total = sum(entry.nbytes for entry in self._index.values())
        self._passed = self._untrimmed = 0
        self.nbytes = 0
        self._file: tuple[Path, Any] | None = None

    def has(self, name: str) -> bool:
        return name in self._index

    def take(self, name: str, *shape: int, part: Part | None = None) -> Tensor:
        tensor = self.read(name, whole_shape(shape, part), part, _FLOATS)
        return tensor.to(self.device, self.dtype)

    def read(
        self,
        name: str,
        whole: tuple[int, ...] | None = None,
        part: Part | None = None,
        dtypes: Container[str] | None = None,
    ) -> Tensor:
        """As it is stored, on the host. whole, dtypes: the shape it must have, and types it may have.

        Raises ModelError naming what is wrong.
        """
        entry = self._index.get(name)
        if entry is None:
            raise ModelError(
                f"{self.folder} has no tensor {name}.", "Check that config.json belongs to these weights."
            )
        if whole is not None and entry.shape != whole:
            raise ModelError(
                f"{name} in {entry.file} has shape {list(entry.shape)}; config.json means {list(whole)}.",
                "Check that config.json belongs to these weights.",
            )
        if dtypes is not None and entry.dtype not in dtypes:
            raise ModelError(
                f"{name} in {entry.file} is of type {entry.dtype} and has no scales; "
                f"{', '.join(_FLOATS)} can be loaded.",
                f"Serve the unquantised checkpoint, or one in these forms: {SUPPORTED}.",
            )
        self._trim(entry.nbytes)
        tensor = self._slice(entry.file, name, part)
        self.nbytes += tensor.nbytes
        self._passed += entry.nbytes
        self._on_bytes(self._passed, self._total)
        return tensor

    def _slice(self, path: Path, name: str, part: Part | None) -> Tensor:
        tensor: Tensor
        if part is None:
            tensor = self._open(path).get_tensor(name)
        else:
            span = (*[slice(None)] * part.axis, slice(part.start, part.stop))
            tensor = self._open(path).get_slice(name)[span]
        return tensor

    def _trim(self, nbytes: int) -> None:
        """Give back to the system what temporaries left: splintered by small objects, it serves no others."""
        self._untrimmed += nbytes
        if self._untrimmed > TRIM_BYTES:
            self._untrimmed = 0
            _malloc_trim(0)

    def _open(self, path: Path) -> Any:
        # one at a time: pages of a mapped file count as ours for as long as it is open
        if self._file is None or self._file[0] != path:
            self._file = path, safe_open(path, framework="pt")
        return self._file[1]


class DummyWeights:
    """Random weights scaled so that activations stay finite through any depth."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.folder: Path | None = None
        self._device = device
        self._generator = torch.Generator(device).manual_seed(0)

    def has(self, name: str) -> bool:
        return not name.endswith(".bias")

    def take(self, name: str, *shape: int, part: Part | None = None) -> Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=self.dtype, device=self._device)
        tensor = torch.empty(shape, dtype=self.dtype, device=self._device)
        return tensor.normal_(std=1 / math.sqrt(shape[-1]), generator=self._generator)


def whole_shape(shape: tuple[int, ...], part: Part | None) -> tuple[int, ...]:
    """The shape of the tensor that a part of this shape is taken from."""
    return shape if part is None else (*shape[: part.axis], part.whole, *shape[part.axis + 1 :])


def _no_trim(_pad: int) -> int:
    return 0


# not every C library has it
_malloc_trim: Callable[[int], int] = getattr(ctypes.CDLL(None), "malloc_trim", _no_trim)
