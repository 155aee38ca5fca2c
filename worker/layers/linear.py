"""Linear layers. Own weights in the form the kernels want; know nothing of what they project.

A rank holds some of the outputs of a layer, and computes those; or it holds some of the inputs, and its
product is a term of a sum over all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from decodefleet.kernels import ops

from ..parallel.ranks import ALONE, Ranks
from .norm import RmsNorm


@dataclass(frozen=True)
class LinearOptions:
    """How all linear layers of a model are computed: see `ops.prepare_linear`; and with whom."""

    invariant: bool = True
    quantization: ops.Quantization = "none"
    ranks: Ranks = ALONE


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


class SummedLinear(Linear):
    """The rank has weights for some of the inputs; the layer's output is the sum of all ranks' products."""

    def __init__(self, weights: list[Tensor], biases: list[Tensor], options: LinearOptions) -> None:
        super().__init__(weights, biases, options)
        self._ranks = options.ranks

    def __call__(self, x_TK: Tensor) -> Tensor:
        return self._ranks.sum(super().__call__(x_TK))

    def add_to(self, x_TK: Tensor, residual_TN: Tensor) -> Tensor | None:
        return self._ranks.add_sum(super().__call__(x_TK), residual_TN)


def summed_linear(weights: list[Tensor], biases: list[Tensor], options: LinearOptions) -> Linear:
    """A layer whose inputs are spread over the ranks. biases: on one rank only."""
    kind = Linear if options.ranks.shard.size == 1 else SummedLinear
    return kind(weights, biases, options)
