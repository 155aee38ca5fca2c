"""Norms, gates, rotary with the write to the cache, and block copies."""

from __future__ import annotations

import pytest
import torch
from paged_batches import error_ratio
from poison import poisoned_memory

from decodefleet.kernels.kv_cache.kernel import (
    copy_blocks_triton,
    gather_blocks_triton,
    scatter_blocks_triton,
)
from decodefleet.kernels.kv_cache.layout import KvCache, KvLayout
from decodefleet.kernels.kv_cache.reference import quantise, store_kv
from decodefleet.kernels.rms_norm import reference as rms_reference
from decodefleet.kernels.rms_norm.kernel import (
    add_rms_norm_triton_,
    norm_add_triton_,
    norm_heads_triton_,
    rms_norm_triton,
)
from decodefleet.kernels.rotary.kernel import rotary_store_triton
from decodefleet.kernels.rotary.reference import rotary
from decodefleet.kernels.silu_mul import reference as gate_reference
from decodefleet.kernels.silu_mul.kernel import gate_mul_triton


@pytest.mark.parametrize("D", [1, 33, 80, 576, 4096])
@pytest.mark.parametrize("T", [1, 17])
def test_norms(device: torch.device, half: torch.dtype, T: int, D: int) -> None:
    torch.manual_seed(0)
    x, residual = torch.randn(T, D, device=device).to(half), torch.randn(T, D, device=device)
    w = torch.randn(D, device=device).to(half)
    expected_residual = residual.clone()
    expected = rms_reference.add_rms_norm_(x, expected_residual, w, 1e-5)
    with poisoned_memory():
        found = add_rms_norm_triton_(x, residual, w, 1e-5)
        plain = rms_norm_triton(x.view(T, 1, D), w, 1e-5)
    assert torch.equal(residual, expected_residual)
    assert error_ratio(found, expected) < 0.001
    assert error_ratio(plain, rms_reference.rms_norm(x.view(T, 1, D), w, 1e-5)) < 0.001


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("D", [1, 33, 640])
@pytest.mark.parametrize("T", [1, 17])
def test_norms_behind_a_projection(
    device: torch.device, half: torch.dtype, T: int, D: int, offset: float
) -> None:
    torch.manual_seed(0)
    x, residual = (torch.randn(T, D, device=device) * 9).to(half), torch.randn(T, D, device=device)
    w = torch.randn(D, device=device).to(half)
    expected = residual.clone()
    rms_reference.norm_add_(x, expected, w, 1e-6, offset)
    norm_add_triton_(x, residual, w, 1e-6, offset)
    torch.testing.assert_close(residual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("D", "heads"), [(256, 5), (80, 3)])
def test_norms_of_heads(device: torch.device, half: torch.dtype, D: int, heads: int) -> None:
    torch.manual_seed(0)
    x = (torch.randn(17, heads + 1, D, device=device) * 9).to(half)
    w = torch.randn(heads, D, device=device).to(half)
    expected, found = x.clone(), x.clone()
    rms_reference.norm_heads_(expected, w, 1e-6, 1.0)
    norm_heads_triton_(found, w, 1e-6, 1.0)
    assert error_ratio(found[:, :heads], expected[:, :heads]) < 0.001
    assert torch.equal(found[:, heads], x[:, heads])


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("width", [16, 20, 1536])
def test_gates(device: torch.device, half: torch.dtype, width: int) -> None:
    torch.manual_seed(0)
    gate_up = (torch.randn(17, 2 * width, device=device) * 4).to(half)
    gate_up[0, :2] = torch.tensor([-200.0, 200.0])
    with poisoned_memory():
        silu, gelu = gate_mul_triton(gate_up, "silu"), gate_mul_triton(gate_up, "gelu_tanh")
    assert error_ratio(silu, gate_reference.silu_mul(gate_up)) < 0.001
    assert error_ratio(gelu, gate_reference.gelu_tanh_mul(gate_up)) < 0.001


def make_cache(dtype: torch.dtype, kv_heads: int, D: int, device: torch.device) -> KvCache:
    return KvLayout(layers=2, kv_heads=kv_heads, block_size=16, head_dim=D, dtype=dtype).allocate(5, device)


@pytest.mark.parametrize("kv", ["same", "int8", "fp8"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "D", "R"), [(9, 3, 64, 64), (4, 1, 80, 80), (2, 2, 80, 32), (5, 1, 256, 256)]
)
def test_rotary_store(
    device: torch.device, half: torch.dtype, heads: int, kv_heads: int, D: int, R: int, kv: str
) -> None:
    torch.manual_seed(0)
    dtype = {"same": half, "int8": torch.int8, "fp8": torch.float8_e4m3fn}[kv]
    T = 17
    qkv = torch.randn(T, heads + 2 * kv_heads, D, device=device).to(half)
    # a key of nothing, a tiny one, and one with an outlier
    qkv[0, heads] = 0
    qkv[1, heads] *= 1e-3
    qkv[2, heads, 3] = 300
    angles = torch.outer(torch.arange(100.0, device=device), torch.rand(R // 2, device=device))
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    positions, slots = torch.randint(0, 100, (T,), device=device), torch.randperm(80, device=device)[:T]
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
    expected, found = (make_cache(dtype, kv_heads, D, device) for _ in range(2))
    turned = rotary(k, positions, cos_sin)
    store_kv(turned, v, expected, 1, slots)
    expected_q, expected_sink = rotary(q, positions, cos_sin), rotary(q, positions // 2, cos_sin)
    with poisoned_memory():
        found_q, found_sink = rotary_store_triton(
            qkv.clone(), cos_sin, positions, slots, found, 1, positions // 2
        )
    assert found_sink is not None
    assert error_ratio(found_q, expected_q) < 0.001
    assert error_ratio(found_sink, expected_sink) < 0.001
    assert_same_cache(found, expected)


def assert_same_cache(found: KvCache, expected: KvCache) -> None:
    """Numbers within a rounding, and nothing written that should not be."""
    pairs = [(found.values, expected.values), (found.scales, expected.scales)]
    for one, other in pairs:
        if one is not None and other is not None:
            assert error_ratio(one, other) < 0.001
            assert torch.equal(one[:, 0], other[:, 0])
            assert torch.equal(one.float() == 0, other.float() == 0)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_bits_equal_those_of_torch(device: torch.device, dtype: torch.dtype) -> None:
    """Without rotation nothing differs: all numbers from ties to subnormal ones, values side by side."""
    cache = make_cache(dtype, 1, 256, device)
    steps = torch.cat((torch.arange(-448, 448) / 448, torch.logspace(-7, 0, 900)))
    v = steps[torch.randperm(1792)].view(7, 1, 256).to(device)
    qkv = torch.cat((torch.zeros_like(v), v, v), dim=1)
    cos_sin = torch.cat((torch.ones(8, 128), torch.zeros(8, 128)), dim=-1).to(device)
    index = torch.arange(7, device=device)
    rotary_store_triton(qkv, cos_sin, index, index, cache, 0)
    numbers, scales = quantise(v, dtype)
    assert cache.scales is not None
    for kind in (0, 1):
        stored = cache.values[0, 0, kind, 0, :7]
        assert torch.equal(stored.view(torch.uint8), numbers[:, 0].view(torch.uint8))
        assert torch.equal(cache.scales[0, 0, kind, 0, :7], scales[:, 0])


@pytest.mark.parametrize("slab_bytes", [128, 3 * 128, 40_000])
def test_block_copies(device: torch.device, slab_bytes: int) -> None:
    slabs = torch.randint(0, 255, (6, slab_bytes), dtype=torch.uint8, device=device)
    expected = slabs.clone()
    sources, targets = torch.tensor([1, 2], device=device), torch.tensor([3, 0], device=device)
    copy_blocks_triton(slabs, sources, targets)
    expected[targets] = expected[sources]
    assert torch.equal(slabs, expected)
    staged = torch.empty((2, slab_bytes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    gather_blocks_triton(slabs, torch.tensor([5, 2], device=device), staged)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(staged, slabs[[5, 2]].cpu())
    scatter_blocks_triton(staged, slabs, targets)
    expected[targets] = staged.to(device)
    assert torch.equal(slabs, expected)


def test_nothing_to_copy_copies_nothing(device: torch.device) -> None:
    slabs = torch.ones((2, 128), dtype=torch.uint8, device=device)
    none = torch.empty(0, dtype=torch.int64, device=device)
    copy_blocks_triton(slabs, none, none)
    assert int(slabs.sum()) == 256
