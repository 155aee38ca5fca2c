"""Mixture of experts in Triton: routing, products grouped by expert, weighted sum. Formula: `reference.py`.

Pairs of token and choice are sorted by expert. A program of the product finds its expert and its tile of
pairs from the offsets alone: no step on the host, no padding of the pairs, one grid for every routing. Tiles
of an expert's pairs meet all of K in one chain of chunks, so a row's bits do not depend on the others.
Shapes: x [T, K] or [P, K], W [E, N, K] (gate: [E, 2N, K]) in x's dtype or int8 with a scale per output.
Tolerance: as linear layers, with a second rounding between both products.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import chip_of, launch
from ..linear.kernel import finish, matrix_options, products
from ..primitives import activate
from ..tuning import params
from .prepared import PreparedExperts, Stack
from .reference import Routing, by_expert

COMBINE_BLOCK = 512


@triton.jit
def _route_kernel(
    logits_ptr,
    weights_ptr,
    experts_ptr,
    E,
    RENORMALISE: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    expert, choice = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_C)
    logits = tl.load(logits_ptr + token * E + expert, mask=expert < E, other=float("-inf"))
    shares = tl.exp(logits - tl.max(logits, axis=0))
    shares = shares / tl.sum(shares, axis=0)
    weights, experts = tl.zeros((BLOCK_C,), tl.float32), tl.zeros((BLOCK_C,), tl.int32)
    for c in tl.static_range(CHOICES):
        largest = tl.max(logits, axis=0)
        # the clamp is for logits that are not numbers
        best = tl.minimum(tl.min(tl.where(logits == largest, expert, BLOCK_E), axis=0), E - 1)
        weights += tl.where(choice == c, tl.sum(tl.where(expert == best, shares, 0.0), axis=0), 0.0)
        experts += tl.where(choice == c, best, 0)
        logits = tl.where(expert == best, float("-inf"), logits)
    if RENORMALISE:
        weights = weights / tl.sum(weights, axis=0)
    tl.store(weights_ptr + token * CHOICES + choice, weights, mask=choice < CHOICES)
    tl.store(experts_ptr + token * CHOICES + choice, experts, mask=choice < CHOICES)


# the number of rows changes from step to step and must not compile anew
@triton.jit(do_not_specialize=["T"])
def _experts_kernel(
    x_ptr,
    w_ptr,
    w_scale_ptr,
    order_ptr,
    offsets_ptr,
    out_ptr,
    T,
    N,
    K,
    E,
    CHOICES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    FAST_WIDEN: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LOG2_K: tl.constexpr,
):
    GATED: tl.constexpr = ACTIVATION is not None
    tile, every = tl.program_id(0), tl.arange(0, BLOCK_E)
    begins = tl.load(offsets_ptr + every, mask=every < E, other=0)
    ends = tl.load(offsets_ptr + every + 1, mask=every < E, other=0)
    tiles = (ends - begins + BLOCK_T - 1) // BLOCK_T
    expert = tl.sum((tl.cumsum(tiles, axis=0) <= tile).to(tl.int32), axis=0)
    # there are programs for the most tiles that so many pairs can make
    if expert < E:
        first = tile - tl.sum(tl.where(every < expert, tiles, 0), axis=0)
        pairs = tl.load(offsets_ptr + expert) + first * BLOCK_T + tl.arange(0, BLOCK_T)
        inside = pairs < tl.load(offsets_ptr + expert + 1)
        rows_t = pairs
        if order_ptr is not None:
            rows_t = tl.load(order_ptr + pairs, mask=inside, other=0) // CHOICES
        rows_t = tl.where(inside, rows_t, T).to(tl.int64)
        rows_n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
        outputs = expert.to(tl.int64) * (N * (2 if GATED else 1))
        acc, acc_up, _ = products(
            x_ptr, w_ptr + outputs * K, None, rows_t, rows_n, 0, K, T, N, K, K, 0.0, False, GATED, EVEN_N,
            EVEN_K, False, FAST_WIDEN, BLOCK_N, BLOCK_T, BLOCK_K, LOG2_K,
        )  # fmt: skip
        mask_n = rows_n < N
        scale_ptr = w_scale_ptr
        if w_scale_ptr is not None:
            scale_ptr = w_scale_ptr + outputs
        y = finish(acc, scale_ptr, None, rows_n, mask_n, acc, False)
        if GATED:
            y = activate(y, ACTIVATION) * finish(acc_up, scale_ptr, None, rows_n + N, mask_n, acc, False)
        out_ptrs = out_ptr + pairs.to(tl.int64)[None, :] * N + rows_n[:, None]
        mask = mask_n[:, None] & inside[None, :]
        tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _combine_kernel(
    y_ptr, places_ptr, weights_ptr, residual_ptr, D, CHOICES: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for c in tl.static_range(CHOICES):
        place = tl.load(places_ptr + token * CHOICES + c).to(tl.int64)
        weight = tl.load(weights_ptr + token * CHOICES + c)
        total += weight * tl.load(y_ptr + place * D + columns, mask=columns < D, other=0.0)
    ptrs = residual_ptr + token * D + columns
    tl.store(ptrs, tl.load(ptrs, mask=columns < D, other=0.0) + total, mask=columns < D)


def route_triton(logits_TE: Tensor, choices: int, *, renormalise: bool) -> Routing:
    """As the reference, of contiguous fp32 logits."""
    weights_TC, experts_TC = choose_triton(logits_TE, choices, renormalise=renormalise)
    return Routing(weights_TC, experts_TC, *by_expert(experts_TC, logits_TE.shape[1]))


def choose_triton(logits_TE: Tensor, choices: int, *, renormalise: bool) -> tuple[Tensor, Tensor]:
    """(weights_TC, experts_TC) of `Routing`."""
    T, E = logits_TE.shape
    weights_TC = logits_TE.new_empty(T, choices)
    experts_TC = torch.empty((T, choices), dtype=torch.int32, device=logits_TE.device)
    launch(
        _route_kernel,
        (T,),
        *(logits_TE, weights_TC, experts_TC, E),
        RENORMALISE=renormalise,
        CHOICES=choices,
        BLOCK_E=triton.next_power_of_2(E),
        BLOCK_C=triton.next_power_of_2(choices),
        num_warps=1,
    )
    return weights_TC, experts_TC


def experts_add_triton_(
    x_TD: Tensor, routing: Routing, prepared: PreparedExperts, residual_TD: Tensor
) -> None:
    """residual (fp32, contiguous) += the experts' output for x (contiguous), in place."""
    pairs, choices = len(routing.order_P), routing.weights_TC.shape[1]
    inner_PI = x_TD.new_empty(pairs, prepared.down.in_features)
    y_PD = residual_TD.new_empty(pairs, residual_TD.shape[1])
    grouped(x_TD, routing.order_P, routing.offsets_E1, prepared.gate_up, inner_PI, choices, "silu")
    grouped(inner_PI, None, routing.offsets_E1, prepared.down, y_PD, choices)
    combine(y_PD, routing, residual_TD)


def grouped(
    x: Tensor,
    order_P: Tensor | None,
    offsets_E1: Tensor,
    stack: Stack,
    out_PN: Tensor,
    choices: int,
    activation: str | None = None,
) -> None:
    """out = x·Wᵀ, or act(gate)·up of that, with the W of each pair's expert; pairs in order of experts.

    x [tokens, K] is read at order // choices; without an order x [P, K] lies like the result.
    """
    (P, N), (T, K), E = out_PN.shape, x.shape, len(offsets_E1) - 1
    chip = chip_of(x.device)
    found = params("experts", "few" if P <= 16 * E else "many", chip)
    blocks = found.blocks
    tiles = min(P, -(-P // blocks["BLOCK_T"]) + E)
    launch(
        _experts_kernel,
        (tiles, -(-N // blocks["BLOCK_N"])),
        *(x, stack.weight, stack.scale, order_P, offsets_E1, out_PN, T, N, K, E),
        CHOICES=choices,
        ACTIVATION=activation,
        EVEN_N=N % blocks["BLOCK_N"] == 0,
        EVEN_K=K % blocks["BLOCK_K"] == 0,
        FAST_WIDEN=chip.native_fp8,
        BLOCK_E=triton.next_power_of_2(E),
        LOG2_K=blocks["BLOCK_K"].bit_length() - 1,
        **matrix_options(found, chip),
    )


def combine(y_PD: Tensor, routing: Routing, residual_TD: Tensor) -> None:
    """residual += the weighted sum of each token's choices, in their order."""
    (T, D), choices = residual_TD.shape, routing.weights_TC.shape[1]
    launch(
        _combine_kernel,
        (T, triton.cdiv(D, COMBINE_BLOCK)),
        *(y_PD, routing.places_P, routing.weights_TC, residual_TD, D),
        CHOICES=choices,
        BLOCK=COMBINE_BLOCK,
        num_warps=4,
    )


def _index(size: int) -> Tensor:
    return torch.empty(size, device="meta", dtype=torch.int32)


def _example(
    T: int, N: int, K: int, *, dtype: torch.dtype = torch.bfloat16, activation: str | None = None
) -> None:
    experts, choices = 128, 8
    rows = N * 2 if activation else N
    weight = torch.empty((experts, rows, K), device="meta", dtype=dtype)
    scale = torch.empty((experts, rows), device="meta") if dtype == torch.int8 else None
    x = torch.empty((T if activation else T * choices, K), device="meta", dtype=torch.bfloat16)
    out_dtype = torch.bfloat16 if activation else torch.float32
    out_PN = torch.empty((T * choices, N), device="meta", dtype=out_dtype)
    order_P = _index(T * choices) if activation else None
    grouped(x, order_P, _index(experts + 1), Stack(weight, scale, rows, K), out_PN, choices, activation)


def _combine_example() -> None:
    routing = Routing(torch.empty((8, 8), device="meta"), _index(64), _index(64), _index(64), _index(129))
    combine(torch.empty((64, 2048), device="meta"), routing, torch.empty((8, 2048), device="meta"))


def _route_example(experts: int, choices: int) -> None:
    choose_triton(torch.empty((8, experts), device="meta"), choices, renormalise=True)


VARIANTS: dict[str, Callable[[], None]] = {
    "choose 8 of 128": lambda: _route_example(128, 8),
    "choose 2 of 8": lambda: _route_example(8, 2),
    "gate and up": lambda: _example(8, 768, 2048, activation="silu"),
    "gate and up, int8": lambda: _example(8, 768, 2048, dtype=torch.int8, activation="silu"),
    "gate and up, many rows": lambda: _example(2048, 768, 2048, activation="silu"),
    "down": lambda: _example(8, 2048, 768),
    "down, int8": lambda: _example(8, 2048, 768, dtype=torch.int8),
    "down, many rows": lambda: _example(2048, 2048, 768),
    "combine": _combine_example,
}
