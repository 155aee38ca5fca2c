"""Gated activation of the MLP: act(gate) · up, with gate and up side by side in one tensor."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_mul(gate_up_TI: Tensor) -> Tensor:
    """gate_up_TI [tokens, 2·intermediate] → [tokens, intermediate]; fp32 inside, rounded once."""
    gate, up = gate_up_TI.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up_TI.dtype)


def gelu_tanh_mul(gate_up_TI: Tensor) -> Tensor:
    """The same with GELU in its tanh form (Hendrycks & Gimpel 2016), as Gemma has it."""
    gate, up = gate_up_TI.float().chunk(2, dim=-1)
    return (F.gelu(gate, approximate="tanh") * up).to(gate_up_TI.dtype)
