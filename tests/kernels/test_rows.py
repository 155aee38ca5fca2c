"""Norms, rotary with KV write, and the gate: native against reference, and rows apart from each other."""

from __future__ import annotations

import pytest
import torch
from paged_batches import copy_of, error_ratio, make_batch, quantised

from decodefleet.kernels import ops
from decodefleet.kernels.kv_cache.reference import store_kv
from decodefleet.kernels.rms_norm import reference as rms_reference
from decodefleet.kernels.rotary import reference as rotary_reference
from decodefleet.kernels.rotary.reference import rotary, rotary_store
from decodefleet.kernels.silu_mul import reference as gate_reference

ROWS = [1, 2, 17, 63]


@pytest.mark.parametrize("D", [16, 576, 4096, 80, 33])
@pytest.mark.parametrize("T", ROWS)
def test_add_rms_norm(threads: int, T: int, D: int) -> None:
    torch.manual_seed(0)
    x, residual, w = torch.randn(T, D).bfloat16(), torch.randn(T, D), torch.randn(D).bfloat16()
    expected_residual = residual.clone()
    expected = rms_reference.add_rms_norm_(x, expected_residual, w, 1e-5)
    first = residual[:1].clone()
    found = ops.add_rms_norm_(x, residual, w, 1e-5)
    assert torch.equal(residual, expected_residual)
    assert error_ratio(found, expected) < 0.004
    assert torch.equal(ops.add_rms_norm_(x[:1].contiguous(), first, w, 1e-5)[0], found[0])


@pytest.mark.parametrize("D", [640, 33])
def test_embed(threads: int, D: int) -> None:
    table, tokens = torch.randn(50, D).bfloat16(), torch.randint(0, 50, (17,))
    assert torch.equal(ops.embed(tokens, table), table[tokens].float())
    assert torch.equal(ops.embed(tokens, table, 25.25), table[tokens].float() * 25.25)
    parts = [ops.embed(tokens, table[first : first + 20], 25.25, first) for first in (0, 20, 40)]
    assert torch.equal(sum(parts), ops.embed(tokens, table, 25.25)), "each token is in one part of the table"


@pytest.mark.parametrize("D", [640, 33])
@pytest.mark.parametrize("T", ROWS)
def test_norm_of_the_residual_stream_alone(threads: int, T: int, D: int) -> None:
    torch.manual_seed(0)
    residual, w = torch.randn(T, D) * 30, torch.randn(D).bfloat16()
    before = residual.clone()
    found = ops.add_rms_norm_(None, residual, w, 1e-6, 1.0)
    assert torch.equal(residual, before)
    assert found.dtype == torch.bfloat16
    assert error_ratio(found, rms_reference.rms_norm(residual, w, 1e-6, 1.0)) < 0.004
    assert torch.equal(ops.add_rms_norm_(None, residual[-1:], w, 1e-6, 1.0)[0], found[-1])


def test_offset_is_added_before_anything_is_rounded(threads: int) -> None:
    """1 + 2⁻¹⁰ is no bf16 number."""
    residual, w = torch.ones(1, 512), torch.full((512,), 2.0**-10).bfloat16()
    x = torch.full((1, 512), 512.0).bfloat16()
    ops.norm_add_(x, residual, w, 1e-6, 1.0)
    assert residual == pytest.approx(2 + 2.0**-10, abs=1e-6)


@pytest.mark.parametrize("D", [640, 33])
@pytest.mark.parametrize("T", ROWS)
def test_norm_add(threads: int, T: int, D: int) -> None:
    torch.manual_seed(0)
    x, residual, w = (torch.randn(T, D) * 9).bfloat16(), torch.randn(T, D), torch.randn(D).bfloat16()
    expected, last = residual.clone(), residual[-1:].clone()
    rms_reference.norm_add_(x, expected, w, 1e-6, 1.0)
    ops.norm_add_(x, residual, w, 1e-6, 1.0)
    torch.testing.assert_close(residual, expected, atol=1e-5, rtol=1e-5)
    ops.norm_add_(x[-1:].contiguous(), last, w, 1e-6, 1.0)
    assert torch.equal(last[0], residual[-1])


@pytest.mark.parametrize("D", [256, 80, 20])
@pytest.mark.parametrize("T", ROWS)
def test_norm_heads(threads: int, T: int, D: int) -> None:
    torch.manual_seed(0)
    x, w = (torch.randn(T, 6, D) * 9).bfloat16(), torch.randn(5, D).bfloat16()
    expected, found = x.clone(), x.clone()
    rms_reference.norm_heads_(expected, w, 1e-6, 1.0)
    ops.norm_heads_(found, w, 1e-6, 1.0)
    assert error_ratio(found[:, :5], expected[:, :5]) < 0.004
    assert torch.equal(found[:, 5], x[:, 5])
    alone = x[-1:].clone()
    ops.norm_heads_(alone, w, 1e-6, 1.0)
    assert torch.equal(alone[0], found[-1])


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("width", [16, 1536, 96, 20])
@pytest.mark.parametrize("T", ROWS)
def test_gate_mul(threads: int, T: int, width: int, activation: ops.Activation) -> None:
    torch.manual_seed(0)
    gate_up = (torch.randn(T, 2 * width) * 4).bfloat16()
    gate_up[0, :2] = torch.tensor([-200.0, 200.0])
    reference = {"silu": gate_reference.silu_mul, "gelu_tanh": gate_reference.gelu_tanh_mul}[activation]
    found = ops.gate_mul(gate_up, activation)
    assert error_ratio(found, reference(gate_up)) < 0.004
    assert torch.equal(ops.gate_mul(gate_up[-1:].contiguous(), activation)[0], found[-1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "D", "R"),
    [(9, 3, 64, 64), (4, 1, 80, 80), (2, 2, 64, 32), (4, 1, 256, 256), (1, 1, 24, 8)],
)
def test_rotary_store(threads: int, heads: int, kv_heads: int, D: int, R: int, dtype: torch.dtype) -> None:
    """The same bits from both: a cache may be written by one and read by the other."""
    batch = make_batch([(40, 5), (3, 1), (0, 33)], heads=heads, kv_heads=kv_heads, head_dim=D)
    kv = batch.kv if dtype == torch.bfloat16 else quantised(batch.kv, dtype)
    T = batch.q.shape[0]
    angles = torch.outer(torch.arange(100.0), torch.rand(R // 2))
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    qkv = torch.randn(T, heads + 2 * kv_heads, D).bfloat16()
    # a value of nothing, a tiny one, and one with an outlier, which leaves the rest subnormal
    qkv[0, -1], qkv[1, -1], qkv[2, -1, 3] = 0, qkv[1, -1] * 1e-3, 3000
    places, sink_rows = (batch.meta.positions_T, batch.meta.slots_T), batch.meta.positions_T // 2
    expected_kv, found_kv = copy_of(kv), copy_of(kv)
    expected = rotary_store(qkv.clone(), cos_sin, *places, expected_kv, 1, sink_rows)
    found = ops.rotary_store(qkv.clone(), cos_sin, *places, found_kv, 1, sink_rows)
    assert torch.equal(found_kv.slabs, expected_kv.slabs)
    assert not torch.equal(found_kv.slabs, kv.slabs)
    for q, wanted in zip(found, expected, strict=True):
        assert q is not None
        assert wanted is not None
        assert torch.equal(q, wanted)
    assert ops.rotary_store(qkv, cos_sin, *places, found_kv, 1)[1] is None


@pytest.mark.parametrize("span", [None, 70])
def test_angles_of_any_position(threads: int, span: int | None) -> None:
    positions = torch.tensor([0, 1, 69, 70, 71, 5000, 10**6, 10**9 + 7])
    inverse = torch.rand(20, dtype=torch.float64)
    found = ops.angles(positions, inverse, span)
    assert found.shape == (8 if span is None else 16, 40)
    torch.testing.assert_close(found, rotary_reference.angles(positions, inverse, span), atol=1e-6, rtol=0)
    alone = ops.angles(positions[5:6].clone(), inverse, span)
    assert torch.equal(alone[0], found[5])
    assert torch.equal(alone[-1], found[-3])


def test_rotation_keeps_lengths_and_relative_angles() -> None:
    angles = torch.outer(torch.arange(50.0), torch.rand(32))
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    q, k = torch.randn(1, 1, 64), torch.randn(1, 1, 64)

    def product(p: int, s: int) -> float:
        at = torch.tensor
        return float((rotary(q, at([p]), cos_sin) * rotary(k, at([s]), cos_sin)).sum())

    assert product(20, 10) == pytest.approx(product(40, 30), rel=1e-4)
    assert float(rotary(q, torch.tensor([7]), cos_sin).norm()) == pytest.approx(float(q.norm()), rel=1e-5)


def test_store_and_copy_touch_only_what_they_name() -> None:
    layout = ops.KvLayout(layers=2, kv_heads=1, block_size=16, head_dim=8, dtype=torch.float32)
    cache = layout.allocate(4, torch.device("cpu"))
    kv = cache.values.fill_(7.0)
    store_kv(torch.ones(2, 1, 8), torch.zeros(2, 1, 8), cache, 0, torch.tensor([16, 35]))
    assert float(kv[1, 0, 0, 0, 0].sum()) == 8
    assert float(kv[2, 0, 1, 0, 3].sum()) == 0
    assert int((kv != 7.0).sum()) == 4 * 8
    before = kv.clone()
    ops.copy_blocks(cache.slabs, torch.tensor([1, 2]), torch.tensor([3, 0]))
    assert torch.equal(kv[3], before[1])
    assert torch.equal(kv[0], before[2])
    assert torch.equal(kv[1:3], before[1:3])
