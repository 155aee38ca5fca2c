from __future__ import annotations

import pytest
import torch
from paged_batches import error_ratio

from decodefleet.kernels.cpu.native import library
from decodefleet.kernels.linear.prepared import apply_linear, prepare_linear
from decodefleet.kernels.linear.reference import linear_reference, quantize_int8

SHAPES = [(576, 960), (1536, 576), (64, 16), (33, 50), (80, 7), (2, 1)]
ROWS = [1, 2, 3, 4, 5, 7, 8, 9, 16, 63, 130]


@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize(("K", "N"), SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_agrees_with_the_reference(threads: int, K: int, N: int, bias: bool, native: bool) -> None:
    torch.manual_seed(0)
    w_NK = torch.randn(N, K).bfloat16()
    b_N = torch.randn(N).bfloat16() if bias else None
    prepared = prepare_linear(w_NK, b_N, invariant=True, native=native)
    for T in ROWS:
        x_TK = torch.randn(T, K).bfloat16()
        assert error_ratio(apply_linear(x_TK, prepared), linear_reference(x_TK, w_NK, b_N)) < 0.004


@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize(("K", "N"), SHAPES)
def test_a_row_does_not_see_the_others(threads: int, K: int, N: int, native: bool) -> None:
    torch.manual_seed(1)
    prepared = prepare_linear(torch.randn(N, K).bfloat16(), None, invariant=True, native=native)
    x_TK = torch.randn(max(ROWS), K).bfloat16()
    whole = apply_linear(x_TK, prepared)
    for T in ROWS:
        for start in (0, max(ROWS) - T):
            part = apply_linear(x_TK[start : start + T], prepared)
            assert torch.equal(part, whole[start : start + T])


@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize(("K", "N"), SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_int8_weights(K: int, N: int, bias: bool, native: bool) -> None:
    torch.manual_seed(0)
    w_NK = torch.randn(N, K).bfloat16()
    b_N = torch.randn(N).bfloat16() if bias else None
    q_NK, scale_N = quantize_int8(w_NK)
    rounded = q_NK * scale_N[:, None]
    assert float((rounded - w_NK.float()).abs().max()) <= float(scale_N.max()) / 2 * 1.01
    prepared = prepare_linear(w_NK, b_N, invariant=True, quantization="int8", native=native)
    x_TK = torch.randn(max(ROWS), K).bfloat16()
    whole = apply_linear(x_TK, prepared)
    wanted = linear_reference(x_TK.float(), rounded, b_N)
    assert error_ratio(whole, wanted) < 0.006
    for T in ROWS:
        assert torch.equal(apply_linear(x_TK[:T], prepared), whole[:T])


def test_threads_do_not_change_a_bit() -> None:
    from decodefleet.kernels import ops

    prepared = prepare_linear(torch.randn(2000, 576).bfloat16(), None, invariant=True)
    x_TK = torch.randn(5, 576).bfloat16()
    results = []
    for count in (1, 2, 3):
        ops.set_cpu_threads(count)
        results.append(apply_linear(x_TK, prepared))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_fp32_output_is_not_rounded() -> None:
    w_NK = torch.randn(48, 64).bfloat16()
    x_TK = torch.randn(3, 64).bfloat16()
    exact = x_TK.double() @ w_NK.double().T
    found = apply_linear(x_TK, prepare_linear(w_NK, None, invariant=True), torch.float32)
    assert found.dtype == torch.float32
    if library() is not None:
        assert error_ratio(found, exact) < 1e-6


def test_other_dtypes_take_the_torch_path() -> None:
    w_NK = torch.randn(48, 64)
    prepared = prepare_linear(w_NK, None, invariant=True)
    assert prepared.native is None
    x_TK = torch.randn(3, 64)
    assert error_ratio(apply_linear(x_TK, prepared), linear_reference(x_TK, w_NK)) < 1e-5


def test_no_rows_give_no_rows() -> None:
    for native in (True, False):
        prepared = prepare_linear(torch.randn(48, 64).bfloat16(), None, invariant=True, native=native)
        assert apply_linear(torch.empty(0, 64).bfloat16(), prepared).shape == (0, 48)
