"""Starting a Triton kernel: one call that runs it on tensors, or only compiles it when asked to pretend.

Launchers call `launch` and never `kernel[grid]`, so that ahead-of-time compilation, the benchmark's table
and a real run see the same arguments, hence the same specialisation. Knows chips by name; knows no operation.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

# products and sums may contract in every kernel that does not ask otherwise; the default differs by release
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


@dataclass(frozen=True)
class Chip:
    """arch: sm_80, gfx942, ... (sm_90 stands in where Triton interprets); multiprocessors: how many."""

    arch: str
    multiprocessors: int

    @property
    def amd(self) -> bool:
        return self.arch.startswith("gfx")

    @property
    def native_fp8(self) -> bool:
        """Whether e4m3 converts in hardware."""
        return not self.amd and int(self.arch.removeprefix("sm_")) >= 89


# sizes that decide splits when compiling without the chip: A100, H100, B200, MI300X
CHIPS = {
    "sm_80": Chip("sm_80", 108),
    "sm_90": Chip("sm_90", 132),
    "sm_100": Chip("sm_100", 148),
    "gfx942": Chip("gfx942", 304),
}

Recorder = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]
_pretended: ContextVar[tuple[Chip, Recorder] | None] = ContextVar("pretended", default=None)


def chip_of(device: torch.device) -> Chip:
    """What launch parameters are chosen for; on CPU, where kernels are interpreted, an H100."""
    pretended = _pretended.get()
    if pretended is not None:
        return pretended[0]
    if device.type != "cuda":
        return CHIPS["sm_90"]
    return _chip(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _chip(index: int) -> Chip:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        return Chip(properties.gcnArchName.split(":")[0], properties.multi_processor_count)
    return Chip(f"sm_{properties.major}{properties.minor}", properties.multi_processor_count)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Runs `kernel` over `grid` programs; an empty grid runs nothing."""
    pretended = _pretended.get()
    if pretended is not None:
        pretended[1](kernel, args, options)
    elif all(grid):
        kernel[grid](*args, **options)


@contextmanager
def pretend(chip: Chip, recorder: Recorder) -> Iterator[None]:
    """Inside, launches go to `recorder` as if on `chip`; tensors may lie on torch's meta device."""
    token = _pretended.set((chip, recorder))
    try:
        yield
    finally:
        _pretended.reset(token)
