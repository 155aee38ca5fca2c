"""Moving whole blocks in Triton: within the cache (copy-on-write), and to and from staging buffers (swap).

Slabs [blocks, ...] are bytes: of any dtype, contiguous, a multiple of 4 bytes each. A staging buffer holds n
slabs, plain contiguous bytes; it may be pinned host memory, which kernels reach directly. Copies are exact.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import launch

# 16 bytes per thread and load, four loads in flight
CHUNK_WORDS = 2048


@triton.jit(do_not_specialize_on_alignment=["source_ids_ptr", "target_ids_ptr"])
def _copy_kernel(source_ptr, target_ptr, source_ids_ptr, target_ids_ptr, words, CHUNK: tl.constexpr):
    source, target = tl.program_id(0).to(tl.int64), tl.program_id(0).to(tl.int64)
    if source_ids_ptr is not None:
        source = tl.load(source_ids_ptr + source).to(tl.int64)
    if target_ids_ptr is not None:
        target = tl.load(target_ids_ptr + target).to(tl.int64)
    inside = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    data = tl.load(source_ptr + source * words + inside, mask=inside < words)
    tl.store(target_ptr + target * words + inside, data, mask=inside < words)


def copy_blocks_triton(slabs: Tensor, sources: Tensor, targets: Tensor) -> None:
    """slabs[targets] = slabs[sources]; no block is both source and target."""
    _copy(slabs, slabs, sources, targets)


def gather_blocks_triton(slabs: Tensor, blocks: Tensor, out: Tensor) -> None:
    """out = slabs[blocks]; out: contiguous, on the device or pinned."""
    _copy(slabs, out, blocks, None)


def scatter_blocks_triton(staged: Tensor, slabs: Tensor, blocks: Tensor) -> None:
    """slabs[blocks] = staged; staged: contiguous, on the device or pinned."""
    _copy(staged, slabs, None, blocks)


def _copy(source: Tensor, target: Tensor, source_ids: Tensor | None, target_ids: Tensor | None) -> None:
    ids = source_ids if source_ids is not None else target_ids
    assert ids is not None
    source, target = (x.flatten(1).view(torch.int32) for x in (source, target))
    words = source.shape[1]
    assert target.shape[1] == words, "slabs of one size"
    grid = (ids.numel(), triton.cdiv(words, CHUNK_WORDS))
    launch(_copy_kernel, grid, source, target, source_ids, target_ids, words, CHUNK=CHUNK_WORDS, num_warps=4)


def _example() -> tuple[Tensor, Tensor]:
    return torch.empty((64, 1 << 21), device="meta", dtype=torch.uint8), torch.empty(
        4, device="meta", dtype=torch.int64
    )


VARIANTS: dict[str, Callable[[], None]] = {
    "copy": lambda: copy_blocks_triton(_example()[0], _example()[1], _example()[1]),
    "gather": lambda: gather_blocks_triton(_example()[0], _example()[1], _example()[0]),
    "scatter": lambda: scatter_blocks_triton(*_example()[:1], *_example()),
}
