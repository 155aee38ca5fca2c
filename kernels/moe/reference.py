"""Mixture of experts: plain fp32 reference, and the form in torch whose rows don't see each other.

Formula: h += Σ_c w_c · down_e(act(gate_e·x) ∘ up_e·x) over the C experts e with the largest logits; w is the
softmax over all logits, divided by the sum of those chosen where `renormalise` (Shazeer et al. 2017).
Shapes: logits_TE [tokens, experts], gate_up [E, 2·I, D] (gate, then up), down [E, D, I].
A pair is token·C + choice; P of them, in order of experts and then tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..linear.reference import linear_row_tiles
from ..silu_mul.reference import silu_mul

# weights of an expert
Matrix = Callable[[int], Tensor]


class Routing(NamedTuple):
    """weights_TC: fp32; all others int32.

    order_P: pairs by expert, then by token; places_P: the inverse; offsets_E1: where an expert's pairs begin.
    """

    weights_TC: Tensor
    experts_TC: Tensor
    order_P: Tensor
    places_P: Tensor
    offsets_E1: Tensor


def route(logits_TE: Tensor, choices: int, *, renormalise: bool) -> Routing:
    """Of equal logits the expert of the lower number goes first."""
    order_TE = logits_TE.sort(dim=-1, descending=True, stable=True).indices
    experts_TC = order_TE[:, :choices]
    weights_TC = logits_TE.float().softmax(dim=-1).gather(1, experts_TC)
    if renormalise:
        weights_TC = weights_TC / weights_TC.sum(dim=-1, keepdim=True)
    return Routing(weights_TC, experts_TC.int(), *by_expert(experts_TC.int(), logits_TE.shape[1]))


def by_expert(experts_TC: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """(order_P, places_P, offsets_E1) of `Routing`; waits for nothing on a device."""
    sorted_P, order_P = experts_TC.flatten().sort(stable=True)
    bounds_E1 = torch.arange(experts + 1, device=experts_TC.device, dtype=sorted_P.dtype)
    places_P = torch.empty_like(order_P).scatter_(
        0, order_P, torch.arange(len(order_P), device=order_P.device)
    )
    return order_P.int(), places_P.int(), torch.searchsorted(sorted_P, bounds_E1, out_int32=True)


def experts_reference(x_TD: Tensor, routing: Routing, gate_up: Tensor, down: Tensor) -> Tensor:
    """fp32 [tokens, D]: what is to be added to the residual stream; token by token."""
    x_TD, gate_up, down = x_TD.float(), gate_up.float(), down.float()
    out_TD = torch.zeros_like(x_TD)
    for t, (weights, experts) in enumerate(zip(routing.weights_TC, routing.experts_TC, strict=True)):
        for weight, e in zip(weights, experts, strict=True):
            gate, up = (gate_up[e] @ x_TD[t]).chunk(2)
            out_TD[t] += weight * (down[e] @ (torch.nn.functional.silu(gate) * up))
    return out_TD


def experts_add_(x_TD: Tensor, routing: Routing, gate_up: Matrix, down: Matrix, residual_TD: Tensor) -> None:
    """residual (fp32) += the experts' output, in place; all products are calls of one shape."""
    choices = routing.weights_TC.shape[1]
    bounds = routing.offsets_E1.tolist()
    y_PD = residual_TD.new_empty(len(routing.order_P), residual_TD.shape[1])
    for e, (begin, end) in enumerate(pairwise(bounds)):
        if begin < end:
            rows = routing.order_P[begin:end].long() // choices
            inner = silu_mul(linear_row_tiles(x_TD[rows], gate_up(e)))
            y_PD[begin:end] = linear_row_tiles(inner, down(e)).float()
    y_TCD = y_PD[routing.places_P.long()].view(-1, choices, y_PD.shape[1])
    total_TD = torch.zeros_like(residual_TD)
    # one after the other: how a sum over a dimension associates is the library's choice
    for c in range(choices):
        total_TD += routing.weights_TC[:, c, None] * y_TCD[:, c]
    residual_TD += total_TD
