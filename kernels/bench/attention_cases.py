"""What is timed of the cache: attention at decode and prefill, rotary with the write, block copies.

Peers where they can be had: torch's scaled dot product on keys and values side by side, FlashInfer on pages.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .. import ops
from ..kv_cache.layout import KvCache, KvLayout
from ..kv_cache.reference import quantise
from ..paged_attention.metadata import AttentionMetadata
from ..paged_attention.reference import paged_attention_reference
from ..rotary import reference as rotary_reference
from .case import Case, Model, Work

BF16 = torch.bfloat16
BLOCK = 16


def attention_cases(model: Model, device: torch.device) -> Iterator[Case]:
    gpu = device.type == "cuda"
    decodes = [(64, 4096), (1, 32768), (8, 4096)] if gpu else [(8, 512), (1, 2048)]
    for B, context in decodes:
        yield _attention(f"decode, {B} x {context}", B, 1, context, BF16, model, device)
    B, context = (64, 4096) if gpu else (1, 2048)
    for dtype in (torch.int8, torch.float8_e4m3fn):
        name = str(dtype).removeprefix("torch.").removesuffix("_e4m3fn")
        yield _attention(f"decode, {B} x {context}, {name}", B, 1, context, dtype, model, device)
    yield _attention("prefill, 512 after 1536", 1, 512, 2048, BF16, model, device)
    yield _rotary(64, model, device)
    yield _copies(32 if gpu else 4, model, device)


def _attention(
    variant: str, B: int, query: int, context: int, dtype: torch.dtype, model: Model, device: torch.device
) -> Case:
    H, G, D = model.heads, model.kv_heads, model.head_dim

    def make() -> Work:
        meta = uniform_batch(B, query, context, device)
        k_and_v = torch.randn((B * context // BLOCK, 1, 2, G, BLOCK, D), device=device).to(BF16)
        cache = KvLayout(1, G, BLOCK, D, dtype).allocate(k_and_v.shape[0], device)
        if cache.scales is None:
            cache.values.copy_(k_and_v)
        else:
            numbers, scales = quantise(k_and_v.flatten(0, 3), dtype)
            cache.values.copy_(numbers.view(k_and_v.shape))
            cache.scales.copy_(scales.view(cache.scales.shape))
        q_THD = torch.randn((B * query, H, D), device=device).to(BF16)
        scale = D**-0.5
        peers: dict[str, Callable[[], object]] = {}
        if dtype == BF16:
            peers["torch"] = _sdpa(q_THD, k_and_v, B, query, context, scale)
            if query == 1 and device.type == "cuda" and importlib.util.find_spec("flashinfer"):
                peers["flashinfer"] = _flashinfer(q_THD, cache, meta, B, context)
        return Work(
            lambda: ops.paged_attention(q_THD, cache, 0, meta, scale),
            lambda: paged_attention_reference(q_THD, cache, 0, meta, scale),
            peers,
        )

    row_bytes = D * dtype.itemsize + (4 if dtype != BF16 else 0)
    moved = B * context * 2 * G * row_bytes + 2 * B * query * H * D * BF16.itemsize
    # a token sees what comes before it and itself
    seen = query * context - query * (query - 1) // 2
    return Case("paged_attention", variant, moved, 4 * B * H * D * seen, make)


def uniform_batch(B: int, query: int, context: int, device: torch.device) -> AttentionMetadata:
    """B sequences of one length; blocks are dealt in a scattered order."""
    blocks = context // BLOCK
    table_BM = torch.randperm(B * blocks, device=device).view(B, blocks)
    positions_T = torch.arange(context - query, context, device=device).repeat(B)
    sequence_T = torch.arange(B, device=device).repeat_interleave(query)
    slots_T = table_BM[sequence_T, positions_T // BLOCK] * BLOCK + positions_T % BLOCK
    return AttentionMetadata(
        query_start_B1=torch.arange(B + 1, dtype=torch.int32, device=device) * query,
        context_B=torch.full((B,), context, dtype=torch.int32, device=device),
        block_table_BM=table_BM.to(torch.int32),
        positions_T=positions_T,
        slots_T=slots_T,
        max_query=query,
        max_context=context,
    )


def _sdpa(
    q_THD: Tensor, k_and_v: Tensor, B: int, query: int, context: int, scale: float
) -> Callable[[], Tensor]:
    G, D = k_and_v.shape[3], k_and_v.shape[5]
    k, v = (k_and_v[:, 0, i].transpose(1, 2).reshape(B, context, G, D).transpose(1, 2) for i in (0, 1))
    q = q_THD.view(B, query, -1, D).transpose(1, 2)
    mask = None
    if query > 1:
        mask = torch.ones((query, context), dtype=torch.bool, device=q.device).tril(context - query)
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda: attend(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)


def _flashinfer(
    q_THD: Tensor, cache: KvCache, meta: AttentionMetadata, B: int, context: int
) -> Callable[[], object]:
    import flashinfer

    _, _, _, G, _, D = cache.values.shape
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=q_THD.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND")
    starts = torch.arange(B + 1, dtype=torch.int32, device=q_THD.device) * (context // BLOCK)
    last = torch.full((B,), BLOCK, dtype=torch.int32, device=q_THD.device)
    indices = meta.block_table_BM.flatten()
    wrapper.plan(starts, indices, last, q_THD.shape[1], G, D, BLOCK, q_data_type=BF16, kv_data_type=BF16)
    pages = cache.values[:, 0]
    return lambda: wrapper.run(q_THD, pages)


def _rotary(T: int, model: Model, device: torch.device) -> Case:
    H, G, D = model.heads, model.kv_heads, model.head_dim

    def make() -> Work:
        meta = uniform_batch(T, 1, 4 * BLOCK, device)
        cache = KvLayout(1, G, BLOCK, D, BF16).allocate(4 * T, device)
        qkv_THD = torch.randn((T, H + 2 * G, D), device=device).to(BF16)
        cos_sin = torch.rand((4 * BLOCK, D), device=device)
        places = (meta.positions_T, meta.slots_T)
        return Work(
            lambda: ops.rotary_store(qkv_THD.clone(), cos_sin, *places, cache, 0)[0],
            lambda: rotary_reference.rotary_store(qkv_THD.clone(), cos_sin, *places, cache, 0)[0],
        )

    # with the copy that keeps repetitions alike
    return Case("rotary", f"{T} rows", T * D * 2 * (2 * (H + 2 * G) + 2 * (H + G) + 2 * G), 0, make)


def _copies(n: int, model: Model, device: torch.device) -> Case:
    slab_bytes = KvLayout(32, model.kv_heads, BLOCK, model.head_dim, BF16).slab_bytes

    def make() -> Work:
        slabs = torch.zeros((2 * n, slab_bytes), dtype=torch.uint8, device=device)
        sources, targets = torch.arange(2 * n, device=device).view(2, n).unbind()

        def run() -> Tensor:
            ops.copy_blocks(slabs, sources, targets)
            return slabs[0]

        return Work(run, lambda: slabs[sources][0])

    return Case("kv_cache", f"copy of {n} blocks", 2 * n * slab_bytes, 0, make)
