from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from paged_batches import error_ratio
from poison import poisoned_memory

from decodefleet.kernels.launch import CHIPS, Chip
from decodefleet.kernels.linear.kernel import linear_add_triton_, linear_triton, split_size
from decodefleet.kernels.linear.reference import quantize_int8
from decodefleet.kernels.norm_linear import reference
from decodefleet.kernels.norm_linear.kernel import norm_linear_triton

# of which some have several splits, ends inside a tile, and a single row or column
SHAPES = [(64, 128), (80, 200), (50, 1288), (1, 64)]
ROWS = [1, 3, 17, 70]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 0.001, torch.bfloat16: 0.004}


@pytest.fixture(params=["single", "half"])
def dtype(request: pytest.FixtureRequest, half: torch.dtype) -> torch.dtype:
    return torch.float32 if request.param == "single" else half


def weights(
    N: int, K: int, dtype: torch.dtype, device: torch.device, *, int8: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    w_NK = (torch.randn(N, K) / K**0.5).to(device, dtype)
    return quantize_int8(w_NK) if int8 else (w_NK, None)


@pytest.mark.parametrize("int8", [False, True], ids=["plain", "int8"])
@pytest.mark.parametrize(("N", "K"), SHAPES)
def test_linear_and_add(device: torch.device, dtype: torch.dtype, N: int, K: int, int8: bool) -> None:
    torch.manual_seed(0)
    w_NK, scale_N = weights(N, K, dtype, device, int8=int8)
    bias_N = torch.randn(N, device=device).to(dtype)
    for T in ROWS:
        x_TK = torch.randn(T, K, device=device).to(dtype)
        before = torch.randn(T, N, device=device)
        expected, residual = before.clone(), before.clone()
        reference.linear_add_(x_TK, w_NK, scale_N, bias_N, expected)
        with poisoned_memory():
            linear_add_triton_(x_TK, w_NK, scale_N, bias_N, residual)
            found = linear_triton(x_TK, w_NK, scale_N, bias_N)
        assert error_ratio(residual, expected) < TOLERANCE[torch.float32] * 10
        assert found.dtype == dtype
        assert error_ratio(found, expected - before) < TOLERANCE[dtype]


@pytest.mark.parametrize("activation", [None, "silu", "gelu_tanh"])
@pytest.mark.parametrize("int8", [False, True], ids=["plain", "int8"])
@pytest.mark.parametrize(("N", "K"), [(80, 200), (50, 1288)])
def test_norm_linear(
    device: torch.device, dtype: torch.dtype, N: int, K: int, int8: bool, activation: str | None
) -> None:
    torch.manual_seed(0)
    w_NK, scale_N = weights(2 * N if activation else N, K, dtype, device, int8=int8)
    norm_K = (torch.rand(K, device=device) + 0.5).to(dtype)
    # few rows and more take different ways
    for T, offset in ((1, 1.0), (17, 0.0), (17, 1.0)):
        h_TK = torch.randn(T, K, device=device) * 3
        norm = (h_TK, norm_K, 1e-5, w_NK, scale_N, None, activation)
        expected = reference.norm_linear(*norm, offset)
        with poisoned_memory():
            found = norm_linear_triton(*norm, offset=offset)
        assert found.dtype == dtype
        # two roundings, of inputs and of the result, and the product of two results behind a gate
        assert error_ratio(found, expected) < TOLERANCE[dtype] * 2


@pytest.mark.parametrize(("N", "K"), SHAPES)
def test_a_row_does_not_see_the_others(device: torch.device, half: torch.dtype, N: int, K: int) -> None:
    """On a GPU also between few rows and many; the interpreter's products depend on their shapes."""
    torch.manual_seed(1)
    rows = [1, 7, 16, 17, 64, 65, 300] if device.type == "cuda" else [1, 16]
    w_NK = (torch.randn(2 * N, K) / K**0.5).to(device, half)
    norm_K = torch.rand(K, device=device).to(torch.float32 if device.type == "cpu" else half)
    h_TK = torch.randn(max(rows), K, device=device)
    x_TK = h_TK.to(half)
    whole = linear_triton(x_TK, w_NK)
    whole_gated = norm_linear_triton(h_TK, norm_K, 1e-5, w_NK, activation="silu")
    for T in rows:
        for start in (0, max(rows) - T):
            part = slice(start, start + T)
            assert torch.equal(linear_triton(x_TK[part], w_NK), whole[part])
            gated = norm_linear_triton(h_TK[part], norm_K, 1e-5, w_NK, activation="silu")
            assert torch.equal(gated, whole_gated[part])


def test_splits_of_one_tile_in_one_program_and_in_several(
    device: torch.device, half: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chip so small that many rows fill it, and that few rows do not."""
    chip = Chip("sm_90", 4)
    monkeypatch.setattr("decodefleet.kernels.linear.kernel.chip_of", lambda device: chip)
    torch.manual_seed(2)
    N, K, T = 128, 1024, 1100
    assert split_size(N, K, chip, gated=False) == K // 2
    w_NK, x_TK = torch.randn(N, K, device=device).to(half), torch.randn(T, K, device=device).to(half)
    with poisoned_memory():
        many, few = linear_triton(x_TK, w_NK), linear_triton(x_TK[:16], w_NK)
    assert error_ratio(many, x_TK.float() @ w_NK.float().T) < TOLERANCE[half]
    assert error_ratio(few, many[:16]) < TOLERANCE[half]
    if device.type == "cuda":
        assert torch.equal(few, many[:16])


def test_rows_may_lie_apart(device: torch.device, half: torch.dtype) -> None:
    x, w_NK = torch.randn(5, 3, 64, device=device).to(half), torch.randn(32, 64, device=device).to(half)
    assert torch.equal(linear_triton(x[:, 1], w_NK), linear_triton(x[:, 1].contiguous(), w_NK))


@given(
    st.integers(1, 300_000),
    st.integers(1, 60_000),
    st.sampled_from(list(CHIPS.values())),
    st.booleans(),
)
def test_splits_cover_the_sum_in_whole_chunks(N: int, K: int, chip: Chip, gated: bool) -> None:
    split = split_size(N, K, chip, gated=gated)
    splits = -(-K // split)
    assert split % 64 == 0
    assert 1 <= splits <= 16
    assert (splits - 1) * split < K <= splits * split
