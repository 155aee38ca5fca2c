"""Device functions that several operations share."""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dot(a, b, acc):
    """acc + a·b in fp32, from a and b of one dtype."""
    # Triton's interpreter multiplies the bit patterns of bf16; products of bf16 are exact in fp32
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """silu, or gelu by its tanh form, in fp32."""
    if ACTIVATION == "silu":
        return x / (1.0 + tl.exp(-x))
    # tanh(u) = 1 - 2 / (1 + exp(2u))
    u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x * (1.0 - 1.0 / (1.0 + tl.exp(2.0 * u)))
