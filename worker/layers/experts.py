"""A layer's experts and the router before them. Owns weights in the form the kernels want."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from decodefleet.kernels import ops

from .linear import Linear, LinearOptions


@dataclass(frozen=True)
class RouterOptions:
    """experts: how many there are; choices: how many a token meets; renormalise: as for `ops.route`."""

    experts: int
    choices: int
    renormalise: bool


class Experts:
    """Gated MLPs with SiLU, of which each token meets a few."""

    def __init__(
        self,
        router_ED: Tensor,
        gate_up: Iterator[Tensor],
        down: Iterator[Tensor],
        router: RouterOptions,
        options: LinearOptions,
    ) -> None:
        """gate_up, down: of one expert after the other, [2·I, D] and [D, I]; a rank holds part of each I."""
        self._router = router
        self._ranks = options.ranks
        # not rounded: a small matrix, and the choice it makes is all or nothing
        self._gate = Linear([router_ED], [], LinearOptions(options.invariant), out_dtype=torch.float32)
        quantization = options.quantization
        self._experts = ops.prepare_experts(gate_up, down, router.experts, quantization=quantization)

    def add_to(self, x_TD: Tensor, residual_TD: Tensor) -> Tensor | None:
        """residual (fp32) += their output for x, in place; what it returns is still to be added."""
        logits_TE = self._gate(x_TD)
        routing = ops.route(logits_TE, self._router.choices, renormalise=self._router.renormalise)
        if self._ranks.shard.size == 1:
            ops.experts_add_(x_TD, routing, self._experts, residual_TD)
            return None
        y_TD = torch.zeros_like(residual_TD)
        ops.experts_add_(x_TD, routing, self._experts, y_TD)
        return self._ranks.add_sum(y_TD.to(x_TD.dtype), residual_TD)
