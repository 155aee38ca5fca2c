"""Inputs for kernel tests: paged caches with odd lengths, poisoned where nobody may read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from decodefleet.kernels.kv_cache.reference import LIMITS
from decodefleet.kernels.ops import AttentionMetadata, KvCache, KvLayout


@dataclass(frozen=True)
class PagedBatch:
    q: Tensor
    kv: KvCache
    meta: AttentionMetadata


def make_batch(
    spans: list[tuple[int, int]],
    *,
    heads: int = 9,
    kv_heads: int = 3,
    head_dim: int = 64,
    block_size: int = 16,
    layers: int = 2,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> PagedBatch:
    """spans: per sequence (first new position, new tokens); blocks are dealt in a scattered order."""
    torch.manual_seed(seed)
    counts = [-(-(start + count) // block_size) for start, count in spans]
    pool = torch.randperm(sum(counts) + 3).tolist()
    layout = KvLayout(layers, kv_heads, block_size, head_dim, dtype)
    kv = layout.allocate(len(pool), torch.device("cpu"))
    kv.values.copy_(torch.randn(kv.values.shape))
    tables = [[pool.pop() for _ in range(count)] for count in counts]
    # what lies behind the last token was never written by anybody
    for (start, count), table in zip(spans, tables, strict=True):
        kv.values[table[-1], :, :, :, (start + count - 1) % block_size + 1 :] = 1e30
    width = max(counts)
    starts = torch.tensor([0, *(count for _, count in spans)]).cumsum(0)
    positions = [p for start, count in spans for p in range(start, start + count)]
    slots = [
        table[p // block_size] * block_size + p % block_size
        for (start, count), table in zip(spans, tables, strict=True)
        for p in range(start, start + count)
    ]
    meta = AttentionMetadata(
        query_start_B1=starts.to(torch.int32),
        context_B=torch.tensor([start + count for start, count in spans], dtype=torch.int32),
        block_table_BM=torch.tensor(
            [table + table[:1] * (width - len(table)) for table in tables], dtype=torch.int32
        ),
        positions_T=torch.tensor(positions),
        slots_T=torch.tensor(slots),
        max_query=max(count for _, count in spans),
        max_context=max(start + count for start, count in spans),
    )
    return PagedBatch(torch.randn(len(positions), heads, head_dim).to(dtype), kv, meta)


def select_token(batch: PagedBatch, token: int) -> PagedBatch:
    """One token of the batch as a decode of its own."""
    meta = batch.meta
    seq = int((meta.query_start_B1[1:] <= token).sum())
    position = int(meta.positions_T[token])
    single = AttentionMetadata(
        query_start_B1=torch.tensor([0, 1], dtype=torch.int32),
        context_B=torch.tensor([position + 1], dtype=torch.int32),
        block_table_BM=meta.block_table_BM[seq : seq + 1].contiguous(),
        positions_T=meta.positions_T[token : token + 1],
        slots_T=meta.slots_T[token : token + 1],
        max_query=1,
        max_context=position + 1,
    )
    return PagedBatch(batch.q[token : token + 1], batch.kv, single)


def quantised(kv: KvCache, dtype: torch.dtype) -> KvCache:
    """The same numbers as nearly as `dtype` has them, one scale per token and head."""
    blocks, layers, _, kv_heads, block_size, head_dim = kv.values.shape
    cache = KvLayout(layers, kv_heads, block_size, head_dim, dtype).allocate(blocks, kv.values.device)
    assert cache.scales is not None
    cache.scales.copy_(kv.values.float().abs().amax(-1) / LIMITS[dtype])
    numbers = kv.values.float() / cache.scales[..., None]
    cache.values.copy_(numbers.round() if dtype == torch.int8 else numbers)
    return cache


def copy_of(kv: KvCache, device: torch.device | None = None) -> KvCache:
    """The same cache in other memory, on `device` if given."""
    _, layers, _, kv_heads, block_size, head_dim = kv.values.shape
    slabs = kv.slabs.to(device or kv.slabs.device, copy=True)
    return KvLayout(layers, kv_heads, block_size, head_dim, kv.values.dtype).view(slabs)


def error_ratio(found: Tensor, wanted: Tensor) -> float:
    """Root mean square of the difference over that of what is wanted."""
    found, wanted = found.float(), wanted.float()
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-6))
