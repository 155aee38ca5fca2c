"""The variants of paged attention that are compiled ahead of time: calls on tensors without memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..kv_cache.layout import KvLayout
from .kernel import paged_attention_triton
from .metadata import AttentionMetadata, AttentionOptions

META = torch.device("meta")


@dataclass(frozen=True)
class Variant:
    """A shape and options; `query` new tokens in each of 64 sequences with 4,096 tokens in the cache."""

    query: int = 1
    head_dim: int = 128
    heads: int = 32
    kv_heads: int = 8
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16
    window: int | None = None
    sinks: int = 0
    soft_cap: float | None = None
    learned: bool = False
    invariant: bool = False

    def __call__(self) -> None:
        sequences, context = 64, 4096
        cache = KvLayout(2, self.kv_heads, 16, self.head_dim, self.kv_dtype).allocate(8, META)
        q_THD = torch.empty(sequences * self.query, self.heads, self.head_dim, dtype=self.dtype, device=META)
        learned = torch.empty(self.heads, device=META) if self.learned else None
        options = AttentionOptions(self.window, self.sinks, self.soft_cap, learned, self.invariant)
        paged_attention_triton(
            q_THD,
            cache,
            0,
            _metadata(sequences, self.query, context),
            self.head_dim**-0.5,
            options,
            q_THD if self.sinks else None,
        )


def _metadata(sequences: int, query: int, context: int) -> AttentionMetadata:
    tokens = sequences * query
    return AttentionMetadata(
        query_start_B1=torch.empty(sequences + 1, dtype=torch.int32, device=META),
        context_B=torch.empty(sequences, dtype=torch.int32, device=META),
        block_table_BM=torch.empty(sequences, context // 16, dtype=torch.int32, device=META),
        positions_T=torch.empty(tokens, dtype=torch.int64, device=META),
        slots_T=torch.empty(tokens, dtype=torch.int64, device=META),
        max_query=query,
        max_context=context,
    )


FP16, INT8, FP8 = torch.float16, torch.int8, torch.float8_e4m3fn
CHUNK = 512

VARIANTS = {
    "decode": Variant(),
    "decode-64": Variant(head_dim=64, heads=9, kv_heads=3),
    "decode-80-mha-query8": Variant(query=8, head_dim=80, kv_heads=32),
    "decode-96-mqa-fp16": Variant(head_dim=96, kv_heads=1, dtype=FP16, kv_dtype=FP16),
    "decode-256-window-cap": Variant(head_dim=256, heads=16, window=1024, soft_cap=50.0),
    "decode-fp8": Variant(kv_dtype=FP8),
    "decode-int8": Variant(kv_dtype=INT8),
    "decode-64-int8-learned": Variant(head_dim=64, heads=64, kv_dtype=INT8, window=128, learned=True),
    "decode-sinks": Variant(window=1024, sinks=4),
    "decode-invariant": Variant(invariant=True),
    "decode-256-invariant": Variant(head_dim=256, invariant=True),
    "decode-fp8-invariant": Variant(kv_dtype=FP8, invariant=True),
    "prefill": Variant(CHUNK),
    "prefill-64-int8-learned": Variant(CHUNK, head_dim=64, heads=64, kv_dtype=INT8, learned=True),
    "prefill-256-window-cap": Variant(CHUNK, head_dim=256, heads=16, window=1024, soft_cap=50.0),
    "prefill-fp8": Variant(CHUNK, kv_dtype=FP8),
    "prefill-sinks": Variant(CHUNK, window=1024, sinks=4),
    "prefill-invariant": Variant(CHUNK, invariant=True),
    "prefill-256-invariant": Variant(CHUNK, head_dim=256, invariant=True),
}
