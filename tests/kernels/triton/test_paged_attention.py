from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from paged_batches import PagedBatch, copy_of, error_ratio, make_batch, quantised, select_token
from torch import Tensor

from decodefleet.kernels.paged_attention.kernel import paged_attention_triton
from decodefleet.kernels.paged_attention.metadata import AttentionMetadata, AttentionOptions
from decodefleet.kernels.paged_attention.reference import paged_attention_reference, paged_attention_tiles
from decodefleet.kernels.paged_attention.walk import widen

INVARIANT, FREE = AttentionOptions(invariant=True), AttentionOptions(invariant=False)
# Triton's interpreter cuts bf16 off where a chip rounds
TOLERANCE = {torch.float32: 1e-5, torch.float16: 6e-4, torch.bfloat16: 8e-3}
LENGTHS = [[(0, 1)], [(14, 1), (15, 1), (16, 1)], [(62, 1)], [(499, 1), (0, 1), (63, 1)]]
CHUNKS = [[(0, 15)], [(0, 17), (0, 1), (500, 10)], [(63, 40)]]
HEADS = [(9, 3, 64), (4, 4, 80), (5, 1, 128)]
FULL = AttentionOptions(window=40, sinks=4, soft_cap=15.0)


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    """Fresh tensors are full of NaN, so that an output that nobody wrote shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def on_device(batch: PagedBatch, device: torch.device) -> PagedBatch:
    meta = AttentionMetadata(
        **{
            name: value.to(device) if isinstance(value, Tensor) else value
            for name, value in vars(batch.meta).items()
        }
    )
    return PagedBatch(batch.q.to(device), copy_of(batch.kv, device), meta)


def check(
    batch: PagedBatch,
    device: torch.device,
    options: AttentionOptions,
    q_sink: Tensor | None = None,
    tolerance: float | None = None,
) -> None:
    scale = batch.q.shape[2] ** -0.5
    wanted = paged_attention_reference(batch.q, batch.kv, 1, batch.meta, scale, options, q_sink)
    there = on_device(batch, device)
    q_sink = None if q_sink is None else q_sink.to(device)
    found = paged_attention_triton(there.q, there.kv, 1, there.meta, scale, options, q_sink).cpu()
    assert torch.isfinite(found).all()
    assert error_ratio(found, wanted) < (tolerance or TOLERANCE[batch.q.dtype])


@pytest.mark.parametrize("options", [INVARIANT, FREE], ids=["invariant", "free"])
@pytest.mark.parametrize("spans", LENGTHS + CHUNKS, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
def test_agrees_with_the_reference(
    device: torch.device,
    spans: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    head_dim: int,
    options: AttentionOptions,
) -> None:
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    check(make_batch(spans, **shape, dtype=torch.float16), device, options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spans", [[(130, 1), (16, 1)], [(63, 20), (200, 3)]], ids=str)
def test_other_dtypes(device: torch.device, dtype: torch.dtype, spans: list[tuple[int, int]]) -> None:
    check(make_batch(spans, dtype=dtype), device, FREE)


def test_wide_heads_and_many_rows_per_head(device: torch.device) -> None:
    check(make_batch([(40, 1)], heads=2, kv_heads=1, head_dim=256, dtype=torch.float16), device, INVARIANT)
    check(make_batch([(70, 4), (3, 8)], heads=40, kv_heads=1, dtype=torch.float16), device, FREE)


@pytest.mark.parametrize("invariant", [True, False], ids=["invariant", "free"])
@pytest.mark.parametrize("spans", [[(600, 1), (2, 1)], [(130, 3), (0, 2)], [(550, 30), (0, 17)]], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        AttentionOptions(window=40),
        AttentionOptions(window=40, sinks=4),
        AttentionOptions(sinks=70),
        AttentionOptions(soft_cap=15.0),
        AttentionOptions(sink_logits_H=torch.linspace(-2, 4, 4)),
        replace(FULL, sink_logits_H=torch.linspace(-2, 4, 4)),
    ],
    ids=["window", "sinks", "sink-query", "cap", "learned", "all"],
)
def test_options(
    device: torch.device, options: AttentionOptions, spans: list[tuple[int, int]], invariant: bool
) -> None:
    batch = make_batch(spans, heads=4, kv_heads=2, head_dim=32, dtype=torch.float32)
    q_sink = torch.randn_like(batch.q) if options.sinks else None
    if options.sink_logits_H is not None:
        options = replace(options, sink_logits_H=options.sink_logits_H.to(device))
    check(batch, device, replace(options, invariant=invariant), q_sink=q_sink)


@pytest.mark.parametrize("options", [INVARIANT, FREE, FULL], ids=["invariant", "free", "all"])
@pytest.mark.parametrize("spans", [[(200, 1), (14, 1)], [(63, 20), (0, 5)]], ids=str)
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_quantised_cache(
    device: torch.device, dtype: torch.dtype, spans: list[tuple[int, int]], options: AttentionOptions
) -> None:
    batch = make_batch(spans, heads=4, kv_heads=2, dtype=torch.float16)
    batch = replace(batch, kv=quantised(batch.kv, dtype))
    check(batch, device, options, tolerance=TOLERANCE[torch.bfloat16])


@triton.jit
def widen_kernel(x_ptr, out_ptr, KV: tl.constexpr, FAST: tl.constexpr):
    i = tl.arange(0, 256)
    tl.store(out_ptr + i, widen(tl.load(x_ptr + i), tl.float32, KV, FAST))


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_stored_numbers_widen_exactly(device: torch.device, dtype: torch.dtype, fast: bool) -> None:
    bits = torch.arange(-128, 128, dtype=torch.int8)
    out = torch.empty(256, device=device)
    widen_kernel[(1,)](bits.to(device), out, "int8" if dtype == torch.int8 else "fp8", fast)
    wanted = bits.view(dtype).float()
    # nothing is ever stored as NaN
    assert torch.equal(out.cpu()[~wanted.isnan()], wanted[~wanted.isnan()])


@pytest.mark.parametrize("options", [INVARIANT, replace(FULL, window=300)], ids=["plain", "window-sinks-cap"])
def test_a_token_does_not_see_the_batch(device: torch.device, options: AttentionOptions) -> None:
    """Alone as a decode, speculated, in a chunk, in a mixed step: the same bits."""
    spans = [(600, 1), (511, 3), (5, 70), (500, 40)]
    batch = make_batch(spans, heads=2, kv_heads=1, head_dim=32, dtype=torch.float16)
    q_sink = torch.randn_like(batch.q)

    def attend(part: PagedBatch, q_sink: Tensor) -> Tensor:
        there = on_device(part, device)
        sinks = q_sink.to(device) if options.sinks else None
        return paged_attention_triton(there.q, there.kv, 1, there.meta, 0.125, options, sinks)

    whole = attend(batch, q_sink)
    mixed = PagedBatch(batch.q, batch.kv, replace(batch.meta, decodes=2, decode_query=3))
    assert torch.equal(attend(mixed, q_sink), whole)
    for token in (0, 1, 3, 4, 73, 74, 85, 90, 113):
        alone = attend(select_token(batch, token), q_sink[token : token + 1])
        assert torch.equal(alone[0], whole[token])


def test_a_hint_of_decodes_changes_no_result_beyond_rounding(device: torch.device) -> None:
    spans = [(600, 2), (511, 3), (5, 70), (0, 9)]
    batch = make_batch(spans, heads=4, kv_heads=2, head_dim=32, dtype=torch.float16)
    check(PagedBatch(batch.q, batch.kv, replace(batch.meta, decodes=2, decode_query=3)), device, FREE)


@pytest.mark.parametrize("spans", [[(400, 2), (33, 1)], [(400, 20)]], ids=str)
def test_only_keys_that_are_seen_are_read(device: torch.device, spans: list[tuple[int, int]]) -> None:
    """Blocks between sinks and window may belong to somebody else, as may the rest of the last block."""
    batch = make_batch(spans, heads=4, kv_heads=2, head_dim=32, dtype=torch.float32)
    options = AttentionOptions(window=48, sinks=4)
    wanted = paged_attention_reference(batch.q, batch.kv, 1, batch.meta, 0.125, options)
    foreign = torch.ones(batch.kv.values.shape[0], 16, dtype=torch.bool)
    for table, (start, count) in zip(batch.meta.block_table_BM.tolist(), spans, strict=True):
        for p in [*range(4), *range(max(0, start - 47), start + count)]:
            foreign[table[p // 16], p % 16] = False
    batch.kv.values.transpose(1, 4)[foreign] = float("nan")
    there = on_device(batch, device)
    found = paged_attention_triton(there.q, there.kv, 1, there.meta, 0.125, options)
    assert error_ratio(found.cpu(), wanted) < TOLERANCE[torch.float32]


def test_large_scores_do_not_overflow(device: torch.device) -> None:
    batch = make_batch([(40, 5), (200, 1)], dtype=torch.float32)
    loud = PagedBatch(batch.q * 1000, batch.kv, batch.meta)
    # a score of thousands is itself known to a thousandth
    check(loud, device, FREE, tolerance=1e-2)
    check(loud, device, replace(FREE, soft_cap=30.0), tolerance=1e-2)


def test_queries_may_be_a_view_of_the_packed_projection(device: torch.device) -> None:
    batch = on_device(make_batch([(40, 5), (3, 1)], dtype=torch.float16), device)
    packed = torch.randn(6, 9 + 6, 64, device=device, dtype=torch.float16)
    packed[:, :9] = batch.q
    found = paged_attention_triton(packed[:, :9], batch.kv, 1, batch.meta, 0.125)
    assert torch.equal(found, paged_attention_triton(batch.q, batch.kv, 1, batch.meta, 0.125))


def test_the_torch_form_knows_the_same_options() -> None:
    batch = make_batch([(300, 40), (0, 5), (77, 1)], heads=4, kv_heads=2, dtype=torch.float32)
    options = replace(FULL, sink_logits_H=torch.linspace(-2, 4, 4))
    kv = quantised(batch.kv, torch.int8)
    arguments = (batch.q, kv, 1, batch.meta, 0.125, options, torch.randn_like(batch.q))
    assert error_ratio(paged_attention_tiles(*arguments), paged_attention_reference(*arguments)) < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("options", [INVARIANT, FREE, FULL], ids=["invariant", "free", "all"])
def test_launches_can_be_captured(device: torch.device, options: AttentionOptions) -> None:
    """One graph, captured for the longest context, serves shorter ones by what its tensors hold."""
    batch = on_device(make_batch([(600, 1), (511, 1)], dtype=torch.float16), device)
    meta = replace(batch.meta, max_context=4096)
    paged_attention_triton(batch.q, batch.kv, 1, meta, 0.125, options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_attention_triton(batch.q, batch.kv, 1, meta, 0.125, options)
    batch.q.copy_(torch.randn_like(batch.q))
    meta.context_B.copy_(torch.tensor([37, 1]))
    meta.positions_T.copy_(torch.tensor([36, 0]))
    graph.replay()
    cpu = on_device(PagedBatch(batch.q, batch.kv, meta), torch.device("cpu"))
    wanted = paged_attention_reference(cpu.q, cpu.kv, 1, cpu.meta, 0.125, options)
    assert error_ratio(out.cpu(), wanted) < TOLERANCE[torch.float16]
