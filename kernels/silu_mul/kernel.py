"""Gated activation in Triton: act(gate)·up, side by side in a row. Formulas: see `reference.py`.

[tokens, 2·intermediate] → [tokens, intermediate] in float32, bfloat16 or float16; fp32 inside, rounded once.
Where the projection runs in Triton too, `norm_linear` has the gate folded in and this kernel is not needed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import launch
from ..primitives import activate

BLOCK = 1024


@triton.jit
def _gate_kernel(x_ptr, out_ptr, width, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate_ptrs = x_ptr + row * (2 * width) + columns
    gate = tl.load(gate_ptrs, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + width, mask=inside, other=0.0).to(tl.float32)
    y = activate(gate, ACTIVATION) * up
    tl.store(out_ptr + row * width + columns, y.to(out_ptr.dtype.element_ty), mask=inside)


def gate_mul_triton(gate_up_TI: Tensor, activation: str) -> Tensor:
    """activation: silu or gelu_tanh; gate_up_TI is contiguous."""
    T, width = gate_up_TI.shape[0], gate_up_TI.shape[1] // 2
    out_TI = gate_up_TI.new_empty(T, width)
    grid = (T, triton.cdiv(width, BLOCK))
    launch(_gate_kernel, grid, gate_up_TI, out_TI, width, ACTIVATION=activation, BLOCK=BLOCK, num_warps=4)
    return out_TI


def _example(activation: str) -> None:
    gate_mul_triton(torch.empty((8, 28672), device="meta", dtype=torch.bfloat16), activation)


VARIANTS: dict[str, Callable[[], None]] = {
    "silu": lambda: _example("silu"),
    "gelu": lambda: _example("gelu_tanh"),
}
