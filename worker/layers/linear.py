"""Linear layers. Own weights in the form the kernels want; know nothing of what they project."""

from __future__ import annotations

import torch
from torch import Tensor

from decodefleet.kernels import ops


class Linear:
    """y = x·Wᵀ (+ b); several weights with one input are stacked into one product."""

    def __init__(self, weights: list[Tensor], biases: list[Tensor] | None, *, invariant: bool) -> None:
        self._weight_NK = torch.cat(weights) if len(weights) > 1 else weights[0]
        self._bias_N = torch.cat(biases) if biases else None
        self._invariant = invariant

    def __call__(self, x_TK: Tensor) -> Tensor:
        return ops.linear(x_TK, self._weight_NK, self._bias_N, invariant=self._invariant)
