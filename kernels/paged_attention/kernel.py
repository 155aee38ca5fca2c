"""Launches Triton's paged attention: which sequences go to which kernel, and with what.

Contract: as `paged_attention_reference`; q bf16, fp16 or fp32 [tokens, heads, D], the heads of a token side
by side; kv in q's dtype, int8 or float8_e4m3fn, rows of a (layer, K or V, head) contiguous; D ≤ 256, a
multiple of 16. Nothing here reads the device or allocates by data, so calls can be captured in a graph. Every
sequence has context ≥ 1; rows of the output that belong to no sequence are left as they are.

Tolerance against the reference, relative error (RMS): 0.004 in bf16, 0.0006 in fp16, 1e-5 in fp32; weights
are rounded to the cache's dtype (bf16 where it is quantised) before they meet the values. Batch-invariant
(`options.invariant`): a token's output has the same bits in decode and in prefill, in any batch and
chunking, on one chip and release of Triton. Without it, and across chips, the tolerance holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..kv_cache.layout import KvCache
from ..launch import chip_of, launch
from .decode import decode_kernel, merge_kernel
from .metadata import PLAIN, AttentionMetadata, AttentionOptions
from .plan import INVARIANT_SPLIT, RESIDENT, Splits, plan_phases, plan_splits, plan_tiles
from .prefill import prefill_kernel

FAR = 1 << 30
FORMATS = {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}


def paged_attention_triton(
    q_THD: Tensor,
    kv: KvCache,
    layer: int,
    meta: AttentionMetadata,
    scale: float,
    options: AttentionOptions = PLAIN,
    q_sink_THD: Tensor | None = None,
) -> Tensor:
    """Causal attention of this step's tokens over the paged cache → [tokens, heads, D] in q's dtype."""
    call = _Call(q_THD, kv, layer, scale, options, q_sink_THD)
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    sequences = meta.context_B.shape[0]
    phases = plan_phases(meta, sequences)
    if phases.decodes:
        _decode(call, out_THD, meta, phases.decodes, phases.query)
    if phases.decodes < sequences:
        _prefill(call, out_THD, meta, phases.decodes)
    return out_THD


@dataclass(frozen=True)
class _Call:
    q_THD: Tensor
    kv: KvCache
    layer: int
    scale: float
    options: AttentionOptions
    q_sink_THD: Tensor | None

    @property
    def group(self) -> int:
        return self.q_THD.shape[1] // self.kv.kv_heads

    @property
    def sinks(self) -> int:
        """Sinks that need a pass of their own: without window and second query they are keys like others."""
        own = self.options.window is not None or self.q_sink_THD is not None
        return self.options.sinks if own else 0

    def arguments(self, meta: AttentionMetadata, first: int) -> dict[str, Any]:
        """By the kernels' names, for the step's sequences from `first` on."""
        q, options = self.q_THD, self.options
        assert q.stride(2) == 1
        assert q.stride(1) == q.shape[2], "the heads of a token must lie side by side"
        q_sink = q if self.q_sink_THD is None else self.q_sink_THD
        # one byte type for both quantised formats: not every chip knows fp8
        values, scales = self.kv.values, self.kv.scales
        if scales is not None:
            values = values.view(torch.int8)
        return {
            "q_ptr": q,
            "q_sink_ptr": q_sink,
            "keys_ptr": values[:, self.layer, 0],
            "values_ptr": values[:, self.layer, 1],
            "key_scales_ptr": q if scales is None else scales[:, self.layer, 0],
            "value_scales_ptr": q if scales is None else scales[:, self.layer, 1],
            "table_ptr": meta.block_table_BM[first:],
            "query_start_ptr": meta.query_start_B1[first:],
            "context_ptr": meta.context_B[first:],
            "learned_ptr": q if options.sink_logits_H is None else options.sink_logits_H,
            "scale": self.scale,
            "soft_cap": options.soft_cap or 1.0,
            # a window over everything where there are only sinks to set apart
            "window": FAR if options.window is None else options.window,
            "heads": q.shape[1],
            "q_stride": q.stride(0),
            "q_sink_stride": q_sink.stride(0),
            "table_stride": meta.block_table_BM.stride(0),
            "block_stride": values.stride(0),
            "head_stride": values.stride(3),
            "scale_stride": 0 if scales is None else scales.stride(0),
            "scale_head_stride": 0 if scales is None else scales.stride(3),
            "CAPPED": options.soft_cap is not None,
            "KV": FORMATS.get(self.kv.values.dtype, "plain"),
            "FAST_WIDEN": chip_of(q.device).native_fp8,
            "GROUP": self.group,
            "BLOCK_SIZE": self.kv.block_size,
            **self.shared(),
        }

    def shared(self) -> dict[str, Any]:
        """What the merging kernel takes too."""
        D = self.q_THD.shape[2]
        return {
            "BOUNDED": self.options.window is not None or self.sinks > 0,
            "SINKS": self.sinks,
            "LEARNED": self.options.sink_logits_H is not None,
            "INVARIANT": self.options.invariant,
            "D": D,
            "D_PAD": 1 << (D - 1).bit_length(),
            "enable_fp_fusion": False,
        }


def _decode(call: _Call, out_THD: Tensor, meta: AttentionMetadata, sequences: int, query: int) -> None:
    T, heads, D = out_THD.shape
    chip, options = chip_of(out_THD.device), call.options
    kind = "invariant" if options.invariant else "decode"
    tiles = plan_tiles(query * call.group, D, kind=kind, chip=chip)
    splits = _splits(call, meta, sequences * call.kv.kv_heads * tiles.row_tiles, query)
    slots = splits.count + (call.sinks > 0)
    tokens = min(T, sequences * query)
    partial = out_THD.new_empty((tokens, heads, slots, D) if slots > 1 else (1,), dtype=torch.float32)
    weight = out_THD.new_empty((tokens, heads, 2, slots) if slots > 1 else (1,), dtype=torch.float32)
    arguments = call.arguments(meta, 0)
    cut = {"split_tokens": splits.tokens, "splits": splits.count, "slots": slots}
    launch(
        decode_kernel,
        (call.kv.kv_heads * tiles.row_tiles, slots, sequences),
        out_THD,
        partial,
        weight,
        **arguments,
        **cut,
        **tiles.params.options | {"BLOCK_M": tiles.block_m},
        DIRECT=slots == 1,
        ROW_TILES=tiles.row_tiles,
    )
    if slots > 1:
        names = ("query_start_ptr", "context_ptr", "learned_ptr", "window", "heads")
        launch(
            merge_kernel,
            (heads, query, sequences),
            out_THD,
            partial,
            weight,
            **{name: arguments[name] for name in names},
            **cut,
            **call.shared(),
            num_warps=1,
        )


def _splits(call: _Call, meta: AttentionMetadata, programs: int, query: int) -> Splits:
    window = call.options.window
    keys = meta.max_context if window is None else min(meta.max_context, window + query - 1)
    return plan_splits(
        programs=programs,
        keys=keys,
        windowed=window is not None,
        multiprocessors=chip_of(call.q_THD.device).multiprocessors,
        resident=RESIDENT,
        invariant=call.options.invariant,
    )


def _prefill(call: _Call, out_THD: Tensor, meta: AttentionMetadata, first: int) -> None:
    """Sequences from `first` on; those before it have at least a token each."""
    T, _, D = out_THD.shape
    sequences = meta.context_B.shape[0] - first
    kind = "invariant" if call.options.invariant else "prefill"
    rows = (T - first) * call.group
    tiles = plan_tiles(rows, D, kind=kind, chip=chip_of(out_THD.device))
    launch(
        prefill_kernel,
        (rows // tiles.block_m + sequences, call.kv.kv_heads),
        out_THD,
        **call.arguments(meta, first),
        split_tokens=INVARIANT_SPLIT,
        sequences=sequences,
        **tiles.params.options,
    )
