"""Causal attention over a paged KV cache: a plain fp32 reference, and a batched form in fixed tiles.

Formula: o = softmax(q·Kᵀ·scale)·V per head, keys at positions ≤ the query's; grouped queries (GQA, MQA)
share a KV head: query head h reads KV head h // (heads / kv_heads).
Shapes: q_THD [tokens, heads, head_dim], kv [blocks, layers, 2, kv_heads, block_size, head_dim].
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from .metadata import AttentionMetadata

QUERY_TILE = 8
KEY_SPLIT = 256
TILES_AT_ONCE = 64


def paged_attention_reference(
    q_THD: Tensor, kv: Tensor, layer: int, meta: AttentionMetadata, scale: float
) -> Tensor:
    """One sequence after the other, everything in fp32."""
    heads, kv_heads = q_THD.shape[1], kv.shape[3]
    out_THD = torch.empty_like(q_THD)
    for b in range(meta.context_B.numel()):
        start, end = int(meta.query_start_B1[b]), int(meta.query_start_B1[b + 1])
        context = int(meta.context_B[b])
        slab = kv[meta.block_table_BM[b].long(), layer].float()
        k_HSD, v_HSD = (slab[:, i].transpose(0, 1).flatten(1, 2)[:, :context] for i in (0, 1))
        k_HSD, v_HSD = (x.repeat_interleave(heads // kv_heads, dim=0) for x in (k_HSD, v_HSD))
        scores = q_THD[start:end].float().transpose(0, 1) @ k_HSD.transpose(1, 2) * scale
        unseen = torch.arange(context, device=kv.device) > meta.positions_T[start:end, None]
        weights = scores.masked_fill(unseen, float("-inf")).softmax(-1)
        out_THD[start:end] = (weights @ v_HSD).transpose(0, 1).to(q_THD.dtype)
    return out_THD


def paged_attention_tiles(
    q_THD: Tensor, kv: Tensor, layer: int, meta: AttentionMetadata, scale: float
) -> Tensor:
    """Tiles of QUERY_TILE tokens against splits of KEY_SPLIT keys, merged in order of position.

    Every matrix product has one shape, whatever the batch: a token's output depends on its own query and
    cache only (flash-decoding's split and log-sum-exp merge, with a fixed split size).
    """
    rows, seq, last = _tiles(meta)
    out_THD = torch.empty_like(q_THD)
    # tiles of like length together, so that few are carried along through empty splits
    for index in torch.split(last.argsort(), TILES_AT_ONCE):
        _attend(q_THD, kv, layer, meta, scale, rows[index], seq[index], out_THD)
    return out_THD


def _tiles(meta: AttentionMetadata) -> tuple[Tensor, Tensor, Tensor]:
    """Row numbers [tiles, QUERY_TILE] (-1 pads), sequence [tiles] and last position [tiles] of each tile."""
    rows, seq = [], []
    bounds = meta.query_start_B1.tolist()
    for b, (start, end) in enumerate(pairwise(bounds)):
        for first in range(start, end, QUERY_TILE):
            tile = range(first, min(first + QUERY_TILE, end))
            rows.append([*tile, *(-1 for _ in range(QUERY_TILE - len(tile)))])
            seq.append(b)
    device = meta.positions_T.device
    rows_NQ = torch.tensor(rows, device=device)
    return rows_NQ, torch.tensor(seq, device=device), meta.positions_T[rows_NQ.amax(1)]


def _attend(
    q_THD: Tensor,
    kv: Tensor,
    layer: int,
    meta: AttentionMetadata,
    scale: float,
    rows_NQ: Tensor,
    seq_N: Tensor,
    out_THD: Tensor,
) -> None:
    kv_heads, block_size = kv.shape[3], kv.shape[4]
    heads, D = q_THD.shape[1:]
    group, N = heads // kv_heads, rows_NQ.shape[0]
    last_N = meta.positions_T[rows_NQ.amax(1)]
    # [N, kv_heads, group·Q, D]: the queries that share a KV head are rows of one product
    q = q_THD[rows_NQ].view(N, QUERY_TILE, kv_heads, group, D).permute(0, 2, 3, 1, 4).float() * scale
    q = q.reshape(N * kv_heads, group * QUERY_TILE, D)
    positions_NQ = torch.where(rows_NQ < 0, 0, meta.positions_T[rows_NQ])
    peak = q.new_full((N, kv_heads, group * QUERY_TILE, 1), float("-inf"))
    total, acc = torch.zeros_like(peak), q.new_zeros(N, kv_heads, group * QUERY_TILE, D)
    blocks_per_split = KEY_SPLIT // block_size
    for split in range(int(last_N.amax()) // KEY_SPLIT + 1):
        table = meta.block_table_BM[:, split * blocks_per_split : (split + 1) * blocks_per_split]
        k, v = _gather(kv, layer, table[seq_N], blocks_per_split)
        scores = torch.bmm(q, k.transpose(1, 2)).view(N, kv_heads, group * QUERY_TILE, KEY_SPLIT)
        keys = torch.arange(split * KEY_SPLIT, (split + 1) * KEY_SPLIT, device=q.device)
        unseen = (keys > positions_NQ[..., None]).repeat(1, group, 1).unsqueeze(1)
        scores.masked_fill_(unseen, float("-inf"))
        new_peak = torch.maximum(peak, scores.amax(-1, keepdim=True))
        weights = torch.exp(scores - new_peak)
        fade = torch.exp(peak - new_peak)
        total = total * fade + weights.sum(-1, keepdim=True)
        product = torch.bmm(weights.view(N * kv_heads, group * QUERY_TILE, KEY_SPLIT), v)
        acc = acc * fade + product.view_as(acc)
        peak = new_peak
    out = (acc / total).view(N, kv_heads, group, QUERY_TILE, D).permute(0, 3, 1, 2, 4)
    real = rows_NQ >= 0
    out_THD[rows_NQ[real]] = out[real].reshape(-1, heads, D).to(out_THD.dtype)


def _gather(kv: Tensor, layer: int, table_NM: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """Keys and values of one split, fp32 [N·kv_heads, KEY_SPLIT, D]; missing blocks repeat block 0."""
    missing = blocks - table_NM.shape[1]
    if missing:
        table_NM = torch.cat((table_NM, table_NM.new_zeros(table_NM.shape[0], missing)), dim=1)
    slab = kv[table_NM.long(), layer].float()
    k, v = slab.permute(2, 0, 3, 1, 4, 5).flatten(3, 4).flatten(1, 2)
    return k, v
