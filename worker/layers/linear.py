"""Linear layers. Own weights in the form the kernels want; know nothing of what they project."""

from __future__ import annotations

import torch
from torch import Tensor

from decodefleet.kernels import ops


class Linear:
    """y = x·Wᵀ (+ b); several weights with one input are stacked into one product."""

    def __init__(
        self,
        weights: list[Tensor],
        biases: list[Tensor],
        *,
        invariant: bool,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        weight_NK = torch.cat(weights) if len(weights) > 1 else weights[0]
        bias_N = torch.cat(biases) if biases else None
        self._prepared = ops.prepare_linear(weight_NK, bias_N, invariant=invariant)
        self._out_dtype = out_dtype

    def __call__(self, x_TK: Tensor) -> Tensor:
        return ops.linear(x_TK, self._prepared, self._out_dtype)
