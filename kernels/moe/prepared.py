"""The weights of a layer's experts in the form that their kernels want, chosen once at load.

`PreparedExperts` is opaque to callers. Native: packed for `cpu.cpp`, one expert after the other. Weights may
be rounded to int8 with a scale per output.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from ..cpu.arena import weights_arena
from ..cpu.native import Kernels, library
from ..linear.prepared import Quantization, pack_into, packed_shape
from ..linear.reference import quantize_int8
from .reference import Routing, experts_add_


@dataclass(frozen=True)
class Stack:
    """weight: [experts, out, in], or packed. scale: fp32 [experts, out] with int8 weights."""

    weight: Tensor
    scale: Tensor | None
    out_features: int
    in_features: int


@dataclass(frozen=True)
class PreparedExperts:
    """gate_up: the rows of gate, then those of up."""

    gate_up: Stack
    down: Stack
    experts: int
    native: Kernels | None


def prepare_experts(
    gate_up: Iterator[Tensor],
    down: Iterator[Tensor],
    experts: int,
    *,
    quantization: Quantization = "none",
    native: bool = True,
) -> PreparedExperts:
    """gate_up, down: of one expert after the other, [2·I, D] and [D, I]; only one need be there at a time.

    native=False keeps to torch, for comparison.
    """
    first = next(gate_up)
    inner, hidden = first.shape[0] // 2, first.shape[1]
    fits = first.device.type == "cpu" and first.dtype == torch.bfloat16 and not (inner % 16 or hidden % 16)
    kernels = library() if native and fits else None
    first_stack = _stack(chain((first,), gate_up), experts, kernels, quantization)
    return PreparedExperts(first_stack, _stack(down, experts, kernels, quantization), experts, kernels)


def apply_experts(x_TD: Tensor, routing: Routing, prepared: PreparedExperts, residual_TD: Tensor) -> None:
    """residual (fp32) += the experts' output for x [tokens, D], in place; on a CPU."""
    if prepared.native is None:
        gate_up, down = (partial(_widened, stack, x_TD.dtype) for stack in (prepared.gate_up, prepared.down))
        return experts_add_(x_TD, routing, gate_up, down, residual_TD)
    kernels, (T, D), pairs = prepared.native, x_TD.shape, routing.order_P.shape[0]
    choices, inner = pairs // max(T, 1), prepared.down.in_features
    gate_up_PI = torch.empty((pairs, 2 * inner), dtype=torch.bfloat16)
    inner_PI = torch.empty((pairs, inner), dtype=torch.bfloat16)
    y_PD = torch.empty((pairs, D), dtype=torch.float32)
    order = routing.order_P.data_ptr()
    _grouped(kernels, x_TD.contiguous(), order, routing, prepared.gate_up, gate_up_PI, choices)
    kernels.df_silu_mul(gate_up_PI.data_ptr(), inner_PI.data_ptr(), pairs, inner)
    _grouped(kernels, inner_PI, None, routing, prepared.down, y_PD, choices)
    places, weights = routing.places_P.data_ptr(), routing.weights_TC.data_ptr()
    kernels.df_combine(y_PD.data_ptr(), places, weights, residual_TD.data_ptr(), T, D, choices)
    return None


def route_native(kernels: Kernels, logits_TE: Tensor, choices: int, *, renormalise: bool) -> Routing:
    """As `reference.route`, of contiguous fp32 logits."""
    T, E = logits_TE.shape
    weights_TC = torch.empty((T, choices), dtype=torch.float32)
    experts_TC = torch.empty((T, choices), dtype=torch.int32)
    order_P, places_P = (torch.empty(T * choices, dtype=torch.int32) for _ in range(2))
    routing = Routing(weights_TC, experts_TC, order_P, places_P, torch.empty(E + 1, dtype=torch.int32))
    pointers = [tensor.data_ptr() for tensor in (logits_TE, *routing)]
    kernels.df_route(*pointers, T, E, choices, renormalise)
    return routing


def _grouped(
    kernels: Kernels,
    x: Tensor,
    order: int | None,
    routing: Routing,
    stack: Stack,
    y: Tensor,
    choices: int,
) -> None:
    experts = routing.offsets_E1.shape[0] - 1
    scale = None if stack.scale is None else stack.scale.data_ptr()
    places = x.data_ptr(), order, routing.offsets_E1.data_ptr(), stack.weight.data_ptr(), scale, y.data_ptr()
    sizes = stack.out_features, stack.in_features, experts, choices
    kernels.df_experts(*places, *sizes, y.dtype == torch.float32)


def _stack(
    matrices: Iterable[Tensor], experts: int, kernels: Kernels | None, quantization: Quantization
) -> Stack:
    weight, scales, N, K = torch.empty(0), [], 0, 0
    for e, matrix_NK in enumerate(matrices):
        N, K = matrix_NK.shape
        if quantization == "int8":
            matrix_NK, scale_N = quantize_int8(matrix_NK)
            scales.append(scale_N)
        if e == 0:
            shape = (experts, *(packed_shape(N, K) if kernels else (N, K)))
            weight = weights_arena.empty(shape, matrix_NK.dtype) if kernels else matrix_NK.new_empty(shape)
        if kernels is None:
            weight[e] = matrix_NK
        else:
            pack_into(kernels, matrix_NK.contiguous(), weight[e])
    return Stack(weight, torch.stack(scales) if scales else None, N, K)


def _widened(stack: Stack, dtype: torch.dtype, expert: int) -> Tensor:
    weight_NK = stack.weight[expert]
    if stack.scale is None:
        return weight_NK
    return (weight_NK.float() * stack.scale[expert][:, None]).to(dtype)
