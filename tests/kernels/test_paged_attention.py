from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from paged_batches import PagedBatch, error_ratio, make_batch, quantised, select_token
from torch import Tensor

from decodefleet.kernels import ops
from decodefleet.kernels.cpu.native import library
from decodefleet.kernels.ops import AttentionOptions
from decodefleet.kernels.paged_attention.cpu import paged_attention_cpu, supports
from decodefleet.kernels.paged_attention.metadata import PLAIN
from decodefleet.kernels.paged_attention.reference import paged_attention_reference, paged_attention_tiles

Attention = Callable[[PagedBatch, float, AttentionOptions, Tensor | None], Tensor]


def native(batch: PagedBatch, scale: float, options: AttentionOptions, q_sink: Tensor | None) -> Tensor:
    kernels = library()
    if kernels is None:
        pytest.skip("no C++ compiler on this machine")
    return paged_attention_cpu(kernels, batch.q, batch.kv, 1, batch.meta, scale, options, q_sink)


def tiles(batch: PagedBatch, scale: float, options: AttentionOptions, q_sink: Tensor | None) -> Tensor:
    return paged_attention_tiles(batch.q, batch.kv, 1, batch.meta, scale, options, q_sink)


def reference(batch: PagedBatch, scale: float, options: AttentionOptions, q_sink: Tensor | None) -> Tensor:
    return paged_attention_reference(batch.q, batch.kv, 1, batch.meta, scale, options, q_sink)


IMPLEMENTATIONS = [pytest.param(native, id="native"), pytest.param(tiles, id="torch")]
HEADS = [(9, 3, 64), (4, 1, 256), (4, 4, 80), (8, 2, 128), (6, 2, 96), (5, 1, 32), (13, 1, 112)]
SPANS = [
    [(0, 1)],
    [(0, 15), (0, 16), (0, 17)],
    [(0, 63), (499, 1), (14, 1)],
    [(100, 40), (0, 500), (255, 1), (256, 1)],
]
FORMATS = [torch.bfloat16, torch.int8, torch.float8_e4m3fn]
LEARNED = torch.linspace(-2, 4, 4)
OPTIONS = {
    "plain": PLAIN,
    "window": AttentionOptions(window=40),
    "long window": AttentionOptions(window=300),
    "sinks": AttentionOptions(window=40, sinks=4),
    "many sinks, no window": AttentionOptions(sinks=70),
    "cap": AttentionOptions(soft_cap=15.0),
    "learned": AttentionOptions(sink_logits_H=LEARNED),
    "all": AttentionOptions(window=300, sinks=20, soft_cap=15.0, sink_logits_H=LEARNED),
}


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    """Fresh tensors are full of NaN, so that an output that nobody wrote shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def in_format(batch: PagedBatch, dtype: torch.dtype) -> PagedBatch:
    return batch if dtype == torch.bfloat16 else replace(batch, kv=quantised(batch.kv, dtype))


def sink_queries(batch: PagedBatch, options: AttentionOptions) -> Tensor | None:
    torch.manual_seed(7)
    return torch.randn(batch.q.shape).bfloat16() if options.sinks else None


@pytest.mark.parametrize("attention", IMPLEMENTATIONS)
@pytest.mark.parametrize("spans", SPANS, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
def test_agrees_with_the_reference(
    threads: int, attention: Attention, spans: list[tuple[int, int]], heads: int, kv_heads: int, head_dim: int
) -> None:
    batch = make_batch(spans, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    wanted = reference(batch, head_dim**-0.5, PLAIN, None)
    found = attention(batch, head_dim**-0.5, PLAIN, None)
    assert torch.isfinite(found).all()
    assert error_ratio(found, wanted) < 0.004


@pytest.mark.parametrize(
    ("attention", "head_dim"),
    [(native, 64), (native, 80), (native, 256), (tiles, 64)],
    ids=["native-64", "native-80", "native-256", "torch-64"],
)
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_and_formats(
    attention: Attention, dtype: torch.dtype, head_dim: int, options: AttentionOptions
) -> None:
    spans = [(600, 1), (2, 1), (130, 3), (550, 30), (0, 350), (0, 3)]
    batch = in_format(make_batch(spans, heads=4, kv_heads=2, head_dim=head_dim), dtype)
    q_sink = sink_queries(batch, options)
    found = attention(batch, 0.1, options, q_sink)
    assert torch.isfinite(found).all()
    assert error_ratio(found, reference(batch, 0.1, options, q_sink)) < 0.004


@pytest.mark.parametrize("attention", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("options", [PLAIN, OPTIONS["all"]], ids=["plain", "all"])
def test_a_token_does_not_see_the_batch(
    threads: int, attention: Attention, dtype: torch.dtype, options: AttentionOptions
) -> None:
    """Alone as a decode, whose keys are shared out over threads, or one of many rows of a tile."""
    spans = [(100, 40), (0, 300), (255, 1), (600, 3), (511, 1), (512, 2)]
    batch = in_format(make_batch(spans, heads=4, kv_heads=1, seed=3), dtype)
    q_sink = sink_queries(batch, options)
    whole = attention(batch, 0.125, options, q_sink)
    for token in [*range(0, batch.q.shape[0], 23), batch.q.shape[0] - 1]:
        alone = select_token(batch, token)
        one = None if q_sink is None else q_sink[token : token + 1]
        assert torch.equal(attention(alone, 0.125, options, one)[0], whole[token])


@pytest.mark.parametrize("attention", IMPLEMENTATIONS)
def test_what_was_dropped_before_the_window_changes_no_bit(attention: Attention) -> None:
    """Lists of blocks lose entries by 512 tokens; positions are counted in what is left."""
    options = AttentionOptions(window=200)
    batch = make_batch([(1300, 3)], heads=4, kv_heads=1)
    meta = batch.meta
    shorter = replace(
        meta,
        block_table_BM=meta.block_table_BM[:, 64:].contiguous(),
        positions_T=meta.positions_T - 1024,
        context_B=meta.context_B - 1024,
        max_context=meta.max_context - 1024,
    )
    whole = attention(batch, 0.125, options, None)
    assert torch.equal(attention(replace(batch, meta=shorter), 0.125, options, None), whole)


@pytest.mark.parametrize("spans", [[(400, 2), (33, 1)], [(400, 20)], [(700, 90)]], ids=str)
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_only_keys_that_are_seen_are_read(dtype: torch.dtype, spans: list[tuple[int, int]]) -> None:
    """Blocks between sinks and window are somebody else's, as may be the rest of the first and last block."""
    batch = in_format(make_batch(spans, heads=4, kv_heads=2, head_dim=32), dtype)
    options = AttentionOptions(window=48, sinks=4)
    wanted = reference(batch, 0.125, options, None)
    foreign = torch.ones(batch.kv.values.shape[0], 16, dtype=torch.bool)
    table_BM = batch.meta.block_table_BM
    for row, (table, (start, count)) in enumerate(zip(table_BM.tolist(), spans, strict=True)):
        seen = {*range(4), *range(max(0, start - 47), start + count)}
        for p in seen:
            foreign[table[p // 16], p % 16] = False
        for entry in {*range(len(table))} - {p // 16 for p in seen}:
            table_BM[row, entry] = 1 << 30
    numbers = batch.kv.values if batch.kv.scales is None else batch.kv.scales.unsqueeze(-1)
    numbers.transpose(1, 4)[foreign] = float("nan")
    assert error_ratio(native(batch, 0.125, options, None), wanted) < 0.004


@pytest.mark.parametrize("attention", IMPLEMENTATIONS)
def test_large_scores_do_not_overflow(attention: Attention) -> None:
    batch = make_batch([(40, 5)])
    batch = replace(batch, q=batch.q * 100)
    for options in (PLAIN, AttentionOptions(soft_cap=30.0)):
        assert error_ratio(attention(batch, 1.0, options, None), reference(batch, 1.0, options, None)) < 0.004


def test_queries_may_be_a_view_of_the_packed_projection() -> None:
    batch = make_batch([(40, 5), (3, 1)])
    packed = torch.randn(6, 9 + 6, 64).bfloat16()
    packed[:, :9] = batch.q
    view = replace(batch, q=packed[:, :9])
    assert torch.equal(native(view, 0.125, PLAIN, None), native(batch, 0.125, PLAIN, None))


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_what_models_ask_for_is_native(dtype: torch.dtype, head_dim: int) -> None:
    batch = in_format(make_batch([(20, 3)], heads=4, kv_heads=1, head_dim=head_dim), dtype)
    assert supports(batch.q, batch.kv)
    options = AttentionOptions(window=16, sinks=2)
    q_sink = sink_queries(batch, options)
    found = ops.paged_attention(batch.q, batch.kv, 1, batch.meta, 0.3, options, q_sink)
    assert torch.equal(found, native(batch, 0.3, options, q_sink))
