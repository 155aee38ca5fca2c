from __future__ import annotations

import pytest
import torch
from paged_batches import error_ratio
from poison import poisoned_memory

from decodefleet.kernels.linear.reference import quantize_int8
from decodefleet.kernels.moe.kernel import experts_add_triton_, route_triton
from decodefleet.kernels.moe.prepared import PreparedExperts, prepare_experts
from decodefleet.kernels.moe.reference import experts_reference, route

# (experts, choices, hidden, inner), none a multiple of a tile
SHAPES = [(8, 2, 64, 64), (5, 3, 72, 40), (3, 1, 200, 80)]
TOLERANCE = 0.004


def make(
    device: torch.device, half: torch.dtype, E: int, D: int, inner: int, *, int8: bool
) -> tuple[PreparedExperts, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    gate_up, down = (
        (torch.randn(E, *s, device=device) / s[1] ** 0.5).to(half) for s in ((2 * inner, D), (D, inner))
    )
    prepared = prepare_experts(
        iter(gate_up), iter(down), E, quantization="int8" if int8 else "none", native=False
    )
    if int8:
        gate_up, down = (
            torch.stack([q * scale[:, None] for q, scale in map(quantize_int8, stack)])
            for stack in (gate_up, down)
        )
    return prepared, gate_up, down


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize(("E", "C"), [(8, 2), (5, 5), (128, 8)])
def test_routing(device: torch.device, E: int, C: int, renormalise: bool) -> None:
    torch.manual_seed(0)
    logits_TE = torch.randint(-9, 9, (9, E), device=device).float() / 3
    with poisoned_memory():
        found = route_triton(logits_TE, C, renormalise=renormalise)
    expected = route(logits_TE, C, renormalise=renormalise)
    torch.testing.assert_close(found.weights_TC, expected.weights_TC, atol=1e-6, rtol=1e-5)
    for name in ("experts_TC", "order_P", "places_P", "offsets_E1"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_logits_that_are_not_numbers_stay_within_the_experts(device: torch.device) -> None:
    logits_TE = torch.full((2, 6), float("nan"), device=device)
    assert int(route_triton(logits_TE, 3, renormalise=True).experts_TC.max()) < 6


@pytest.mark.parametrize("int8", [False, True], ids=["plain", "int8"])
@pytest.mark.parametrize(("E", "C", "D", "inner"), SHAPES)
def test_agrees_with_the_reference(
    device: torch.device, half: torch.dtype, E: int, C: int, D: int, inner: int, int8: bool
) -> None:
    """Few rows per expert, and so many that they take several wide tiles."""
    prepared, gate_up, down = make(device, half, E, D, inner, int8=int8)
    for T in (1, 5, 17 * E // C + 60):
        x_TD = torch.randn(T, D, device=device).to(half)
        routing = route(torch.randn(T, E, device=device), C, renormalise=True)
        before = torch.randn(T, D, device=device)
        residual = before.clone()
        with poisoned_memory():
            experts_add_triton_(x_TD, routing, prepared, residual)
        expected = experts_reference(x_TD, routing, gate_up, down)
        assert error_ratio(residual - before, expected) < TOLERANCE


def test_all_rows_with_one_expert(device: torch.device, half: torch.dtype) -> None:
    """The experts before and behind it have none."""
    prepared, gate_up, down = make(device, half, 4, 64, 64, int8=False)
    x_TD, logits_TE = torch.randn(70, 64, device=device).to(half), torch.zeros(70, 4, device=device)
    logits_TE[:, 2] = 5.0
    routing, residual = route(logits_TE, 1, renormalise=False), torch.zeros(70, 64, device=device)
    experts_add_triton_(x_TD, routing, prepared, residual)
    assert error_ratio(residual, experts_reference(x_TD, routing, gate_up, down)) < TOLERANCE


def test_a_row_does_not_see_the_others(device: torch.device, half: torch.dtype) -> None:
    """On a GPU also between narrow and wide tiles; the interpreter's products depend on their shapes."""
    prepared, _, _ = make(device, half, 5, 72, 40, int8=False)
    rows = [1, 3, 16, 100] if device.type == "cuda" else [1, 3, 16]
    x_TD = torch.randn(max(rows), 72, device=device).to(half)
    logits_TE = torch.randn(max(rows), 5, device=device)

    def run(part: slice) -> torch.Tensor:
        residual = torch.zeros(max(rows), 72, device=device)[part]
        routing = route(logits_TE[part], 2, renormalise=True)
        experts_add_triton_(x_TD[part], routing, prepared, residual)
        return residual

    whole = run(slice(None))
    for T in rows:
        for part in (slice(0, T), slice(max(rows) - T, None)):
            assert torch.equal(run(part), whole[part])
