from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from paged_batches import error_ratio, make_batch, select_token
from torch import Tensor

from decodefleet.kernels.cpu.native import library
from decodefleet.kernels.ops import AttentionMetadata, KvCache
from decodefleet.kernels.paged_attention.cpu import paged_attention_cpu
from decodefleet.kernels.paged_attention.reference import paged_attention_reference, paged_attention_tiles

Attention = Callable[[Tensor, KvCache, int, AttentionMetadata, float], Tensor]


def native(q: Tensor, kv: KvCache, layer: int, meta: AttentionMetadata, scale: float) -> Tensor:
    kernels = library()
    if kernels is None:
        pytest.skip("no C++ compiler on this machine")
    return paged_attention_cpu(kernels, q, kv, layer, meta, scale)


IMPLEMENTATIONS = [pytest.param(native, id="native"), pytest.param(paged_attention_tiles, id="torch")]
HEADS = [(9, 3, 64), (4, 1, 256), (4, 4, 80), (8, 2, 128), (6, 2, 96), (5, 1, 32)]
SPANS = [
    [(0, 1)],
    [(0, 15), (0, 16), (0, 17)],
    [(0, 63), (499, 1), (14, 1)],
    [(100, 40), (0, 500), (255, 1), (256, 1)],
]


@pytest.mark.parametrize("attention", IMPLEMENTATIONS)
@pytest.mark.parametrize("spans", SPANS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(9, 3, 64), (4, 1, 256), (4, 4, 80), (8, 2, 128), (6, 2, 96), (5, 1, 32)],
)
def test_agrees_with_the_reference(
    threads: int, attention: Attention, spans: list[tuple[int, int]], heads: int, kv_heads: int, head_dim: int
) -> None:
    batch = make_batch(spans, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    scale = head_dim**-0.5
    wanted = paged_attention_reference(batch.q, batch.kv, 1, batch.meta, scale)
    found = attention(batch.q, batch.kv, 1, batch.meta, scale)
    assert torch.isfinite(found).all()
    assert error_ratio(found, wanted) < 0.004


@pytest.mark.parametrize("attention", IMPLEMENTATIONS)
def test_a_token_does_not_see_the_batch(threads: int, attention: Attention) -> None:
    batch = make_batch([(100, 40), (0, 300), (255, 1), (600, 3)])
    whole = attention(batch.q, batch.kv, 1, batch.meta, 0.125)
    for token in range(0, batch.q.shape[0], 7):
        alone = select_token(batch, token)
        assert torch.equal(attention(alone.q, alone.kv, 1, alone.meta, 0.125)[0], whole[token])


@pytest.mark.parametrize("attention", IMPLEMENTATIONS)
def test_large_scores_do_not_overflow(attention: Attention) -> None:
    batch = make_batch([(40, 5)])
    q = batch.q * 100
    wanted = paged_attention_reference(q, batch.kv, 0, batch.meta, 1.0)
    assert error_ratio(attention(q, batch.kv, 0, batch.meta, 1.0), wanted) < 0.004


def test_queries_may_be_a_view_of_the_packed_projection() -> None:
    batch = make_batch([(40, 5), (3, 1)])
    packed = torch.randn(6, 9 + 6, 64).bfloat16()
    packed[:, :9] = batch.q
    assert torch.equal(
        native(packed[:, :9], batch.kv, 1, batch.meta, 0.125),
        native(batch.q, batch.kv, 1, batch.meta, 0.125),
    )
