from __future__ import annotations

import pytest
import torch
from paged_batches import error_ratio

from decodefleet.kernels import ops
from decodefleet.kernels.linear.reference import quantize_int8
from decodefleet.kernels.moe.prepared import PreparedExperts, apply_experts, prepare_experts
from decodefleet.kernels.moe.reference import Routing, experts_reference, route

# (experts, choices, hidden, inner); the native kernels want multiples of 16
SHAPES = [(8, 2, 64, 48), (5, 3, 96, 32), (4, 4, 32, 16)]
ROWS = [1, 2, 7, 33]


def make(
    E: int, D: int, inner: int, *, int8: bool = False, native: bool = True
) -> tuple[PreparedExperts, torch.Tensor, torch.Tensor]:
    """Prepared, and the same weights as they are after rounding."""
    torch.manual_seed(0)
    gate_up, down = (torch.randn(E, *s).bfloat16() / s[1] ** 0.5 for s in ((2 * inner, D), (D, inner)))
    quantization: ops.Quantization = "int8" if int8 else "none"
    prepared = prepare_experts(iter(gate_up), iter(down), E, quantization=quantization, native=native)
    if int8:
        gate_up, down = (
            torch.stack([q * scale[:, None] for q, scale in map(quantize_int8, stack)])
            for stack in (gate_up, down)
        )
    return prepared, gate_up, down


def out_of(x_TD: torch.Tensor, routing: Routing, prepared: PreparedExperts) -> torch.Tensor:
    residual_TD = torch.zeros(x_TD.shape)
    apply_experts(x_TD, routing, prepared, residual_TD)
    return residual_TD


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize(("E", "C"), [(8, 2), (5, 5), (128, 8), (3, 1)])
def test_routing(threads: int, E: int, C: int, renormalise: bool) -> None:
    torch.manual_seed(0)
    # of few values, so that there are equals
    logits_TE = torch.randint(-9, 9, (40, E)).float() / 3
    found = ops.route(logits_TE, C, renormalise=renormalise)
    expected = route(logits_TE, C, renormalise=renormalise)
    torch.testing.assert_close(found.weights_TC, expected.weights_TC, atol=1e-6, rtol=1e-5)
    for name in ("experts_TC", "order_P", "places_P", "offsets_E1"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


def test_pairs_lie_by_expert_then_by_token() -> None:
    routing = route(torch.randn(30, 6), 2, renormalise=True)
    experts = routing.experts_TC.flatten()[routing.order_P.long()]
    assert experts.tolist() == sorted(experts.tolist())
    assert routing.order_P[routing.places_P.long()].tolist() == list(range(60))
    for e, (begin, end) in enumerate(zip(routing.offsets_E1[:-1], routing.offsets_E1[1:], strict=True)):
        own = routing.order_P[begin:end].tolist()
        assert own == sorted(own)
        assert all(experts[begin:end] == e)


@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("int8", [False, True], ids=["bf16", "int8"])
@pytest.mark.parametrize(("E", "C", "D", "inner"), SHAPES)
def test_agrees_with_the_reference_and_rows_do_not_see_each_other(
    threads: int, E: int, C: int, D: int, inner: int, int8: bool, native: bool
) -> None:
    prepared, gate_up, down = make(E, D, inner, int8=int8, native=native)
    x_TD, logits_TE = torch.randn(max(ROWS), D).bfloat16(), torch.randn(max(ROWS), E)
    whole = out_of(x_TD, ops.route(logits_TE, C, renormalise=True), prepared)
    expected = experts_reference(x_TD, route(logits_TE, C, renormalise=True), gate_up, down)
    assert error_ratio(whole, expected) < 0.01
    for T in ROWS:
        for part in (slice(0, T), slice(max(ROWS) - T, None)):
            routing = ops.route(logits_TE[part].contiguous(), C, renormalise=True)
            assert torch.equal(out_of(x_TD[part], routing, prepared), whole[part])


def test_all_rows_with_one_expert(threads: int) -> None:
    """So many that its weights are widened once for all of them."""
    prepared, gate_up, down = make(4, 64, 48)
    x_TD, logits_TE = torch.randn(130, 64).bfloat16(), torch.zeros(130, 4)
    logits_TE[:, 2] = 5.0
    whole = out_of(x_TD, ops.route(logits_TE, 1, renormalise=True), prepared)
    routing = route(logits_TE, 1, renormalise=True)
    assert error_ratio(whole, experts_reference(x_TD, routing, gate_up, down)) < 0.01
    alone = out_of(x_TD[7:8], ops.route(logits_TE[7:8], 1, renormalise=True), prepared)
    assert torch.equal(alone, whole[7:8])


def test_what_was_there_stays() -> None:
    prepared, _, _ = make(8, 64, 48)
    x_TD, before = torch.randn(3, 64).bfloat16(), torch.randn(3, 64)
    routing = ops.route(torch.randn(3, 8), 2, renormalise=True)
    residual = before.clone()
    ops.experts_add_(x_TD, routing, prepared, residual)
    assert torch.equal(residual, before + out_of(x_TD, routing, prepared))
