"""Linear layers. Own weights in the form the kernels want; know nothing of what they project."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from decodefleet.kernels import ops

from .norm import RmsNorm


@dataclass(frozen=True)
class LinearOptions:
    """How all linear layers of a model are computed: see `ops.prepare_linear`."""

    invariant: bool = True
    quantization: ops.Quantization = "none"


class Linear:
    """y = x·Wᵀ (+ b); several weights with one input are stacked into one product."""

    def __init__(
        self,
        weights: list[Tensor],
        biases: list[Tensor],
        options: LinearOptions,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        weight_NK = torch.cat(weights) if len(weights) > 1 else weights[0]
        bias_N = torch.cat(biases) if biases else None
        self._prepared = ops.prepare_linear(
            weight_NK, bias_N, invariant=options.invariant, quantization=options.quantization
        )
        self._out_dtype = out_dtype

    def __call__(self, x_TK: Tensor) -> Tensor:
        return ops.linear(x_TK, self._prepared, self._out_dtype)

    def of_norm(
        self,
        x_TK: Tensor | None,
        residual_TK: Tensor,
        norm: RmsNorm,
        activation: ops.Activation | None = None,
    ) -> Tensor:
        """residual += x, in place; the projection of its norm, or act(gate)·up of that."""
        weights = norm.weight_D, norm.eps, self._prepared
        return ops.norm_linear(x_TK, residual_TK, *weights, activation, norm.offset)

    def add_to(self, x_TK: Tensor, residual_TN: Tensor) -> Tensor | None:
        """Adds the projection to the residual stream, in place; what it returns is still to be added."""
        return ops.linear_add(x_TK, self._prepared, residual_TN)
