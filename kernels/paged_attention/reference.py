"""Causal attention over a paged KV cache: a plain fp32 reference, and a batched form in fixed tiles.

Formula: o = softmax(cap(q·Kᵀ·scale))·V per head over the keys that `visible` names; query head h reads KV
head h // (heads / kv_heads) (GQA, MQA). Sink keys are scored by a query of their own where there is one:
their distance stays in range (Xiao et al. 2024). Learned sink logits join the denominator (gpt-oss).
Shapes: q_THD, q_sink_THD [tokens, heads, head_dim].
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ..kv_cache.layout import KvCache
from .metadata import PLAIN, AttentionMetadata, AttentionOptions

QUERY_TILE = 8
KEY_SPLIT = 256
TILES_AT_ONCE = 64


def visible(keys_S: Tensor, positions: Tensor, options: AttentionOptions) -> Tensor:
    """Which keys a token sees: [*positions.shape, S]."""
    positions = positions[..., None]
    seen = keys_S <= positions
    if options.window is not None:
        seen = seen & ((keys_S > positions - options.window) | (keys_S < options.sinks))
    return seen


def paged_attention_reference(
    q_THD: Tensor,
    kv: KvCache,
    layer: int,
    meta: AttentionMetadata,
    scale: float,
    options: AttentionOptions = PLAIN,
    q_sink_THD: Tensor | None = None,
) -> Tensor:
    """One sequence after the other, everything in fp32."""
    group = q_THD.shape[1] // kv.kv_heads
    out_THD = torch.empty_like(q_THD)
    for b in range(meta.context_B.numel()):
        start, end = int(meta.query_start_B1[b]), int(meta.query_start_B1[b + 1])
        context = int(meta.context_B[b])
        slab = _numbers(kv, layer, meta.block_table_BM[b])
        k_HSD, v_HSD = (slab[:, i].transpose(0, 1).flatten(1, 2)[:, :context] for i in (0, 1))
        k_HSD, v_HSD = (x.repeat_interleave(group, dim=0) for x in (k_HSD, v_HSD))
        scores = q_THD[start:end].float().transpose(0, 1) @ k_HSD.transpose(1, 2)
        if q_sink_THD is not None:
            sink_keys = k_HSD[:, : options.sinks].transpose(1, 2)
            scores[..., : options.sinks] = q_sink_THD[start:end].float().transpose(0, 1) @ sink_keys
        scores = _cap(scores * scale, options.soft_cap)
        seen = visible(torch.arange(context, device=q_THD.device), meta.positions_T[start:end], options)
        scores = scores.masked_fill(~seen, float("-inf"))
        if options.sink_logits_H is not None:
            learned = options.sink_logits_H.float()[:, None, None].expand(*scores.shape[:2], 1)
            weights = torch.cat((scores, learned), dim=-1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        out_THD[start:end] = (weights @ v_HSD).transpose(0, 1).to(q_THD.dtype)
    return out_THD


def _cap(scores: Tensor, soft_cap: float | None) -> Tensor:
    return scores if soft_cap is None else torch.tanh(scores / soft_cap) * soft_cap


def _numbers(kv: KvCache, layer: int, blocks: Tensor) -> Tensor:
    """fp32 [*blocks.shape, 2, kv_heads, block_size, head_dim]."""
    values = kv.values[blocks.long(), layer].float()
    return values if kv.scales is None else values * kv.scales[blocks.long(), layer, ..., None]


@dataclass(frozen=True)
class _Inputs:
    q_THD: Tensor
    kv: KvCache
    layer: int
    meta: AttentionMetadata
    scale: float
    options: AttentionOptions
    q_sink_THD: Tensor | None


def paged_attention_tiles(
    q_THD: Tensor,
    kv: KvCache,
    layer: int,
    meta: AttentionMetadata,
    scale: float,
    options: AttentionOptions = PLAIN,
    q_sink_THD: Tensor | None = None,
) -> Tensor:
    """Tiles of QUERY_TILE tokens against splits of KEY_SPLIT keys, merged in order of position.

    Every matrix product has one shape, whatever the batch: a token's output depends on its own query and
    cache only (flash-decoding's split and log-sum-exp merge, with a fixed split size).
    """
    inputs = _Inputs(q_THD, kv, layer, meta, scale, options, q_sink_THD)
    rows, seq, last = _tiles(meta)
    out_THD = torch.empty_like(q_THD)
    # tiles of like length together, so that few are carried along through empty splits
    for index in torch.split(last.argsort(), TILES_AT_ONCE):
        _attend(inputs, rows[index], seq[index], out_THD)
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


def _attend(inputs: _Inputs, rows_NQ: Tensor, seq_N: Tensor, out_THD: Tensor) -> None:
    kv_heads, meta, options = inputs.kv.kv_heads, inputs.meta, inputs.options
    heads, D = inputs.q_THD.shape[1:]
    group, N = heads // kv_heads, rows_NQ.shape[0]
    q = _packed_queries(inputs.q_THD, rows_NQ, kv_heads, inputs.scale)
    positions_NQ = torch.where(rows_NQ < 0, 0, meta.positions_T[rows_NQ])
    peak = q.new_full((N, kv_heads, group * QUERY_TILE, 1), float("-inf"))
    total, acc = torch.zeros_like(peak), q.new_zeros(*peak.shape[:3], D)
    if options.sink_logits_H is not None:
        learned = options.sink_logits_H.float().view(1, -1, group, 1).expand(N, -1, -1, QUERY_TILE)
        peak, total = learned.reshape(peak.shape), torch.ones_like(peak)
    last = int(meta.positions_T[rows_NQ.amax(1)].amax())
    for first in range(0, last + 1, KEY_SPLIT):
        k, v = _gather(inputs, meta.block_table_BM[seq_N], first)
        keys = torch.arange(first, first + KEY_SPLIT, device=q.device)
        scores = torch.bmm(q, k.transpose(1, 2))
        if inputs.q_sink_THD is not None and first < options.sinks:
            q_sink = _packed_queries(inputs.q_sink_THD, rows_NQ, kv_heads, inputs.scale)
            scores = torch.where(keys < options.sinks, torch.bmm(q_sink, k.transpose(1, 2)), scores)
        scores = _cap(scores, options.soft_cap).view(*peak.shape[:3], KEY_SPLIT)
        unseen = ~visible(keys, positions_NQ, options).repeat(1, group, 1).unsqueeze(1)
        scores.masked_fill_(unseen, float("-inf"))
        new_peak = torch.maximum(peak, scores.amax(-1, keepdim=True))
        # a row that has seen nothing yet has no peak to subtract
        base = new_peak.masked_fill(new_peak == float("-inf"), 0.0)
        weights = torch.exp(scores - base)
        fade = torch.exp(peak - base)
        total = total * fade + weights.sum(-1, keepdim=True)
        product = torch.bmm(weights.view(-1, group * QUERY_TILE, KEY_SPLIT), v)
        acc = acc * fade + product.view_as(acc)
        peak = new_peak
    out = (acc / total).view(N, -1, group, QUERY_TILE, D).permute(0, 3, 1, 2, 4)
    real = rows_NQ >= 0
    out_THD[rows_NQ[real]] = out[real].reshape(-1, heads, D).to(out_THD.dtype)


def _packed_queries(q_THD: Tensor, rows_NQ: Tensor, kv_heads: int, scale: float) -> Tensor:
    """[N·kv_heads, group·QUERY_TILE, D] fp32: the queries that share a KV head are rows of one product."""
    N, D = rows_NQ.shape[0], q_THD.shape[2]
    q = q_THD[rows_NQ].view(N, QUERY_TILE, kv_heads, -1, D).permute(0, 2, 3, 1, 4).float() * scale
    return q.reshape(N * kv_heads, -1, D)


def _gather(inputs: _Inputs, table_NM: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Keys and values from position `first`, fp32 [N·kv_heads, KEY_SPLIT, D]; missing blocks are block 0."""
    block_size = inputs.kv.block_size
    blocks = KEY_SPLIT // block_size
    table_NM = table_NM[:, first // block_size : first // block_size + blocks]
    missing = blocks - table_NM.shape[1]
    if missing:
        table_NM = torch.cat((table_NM, table_NM.new_zeros(table_NM.shape[0], missing)), dim=1)
    slab = _numbers(inputs.kv, inputs.layer, table_NM)
    k, v = slab.permute(2, 0, 3, 1, 4, 5).flatten(3, 4).flatten(1, 2)
    return k, v
