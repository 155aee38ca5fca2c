"""From a plan to tensors: the flat batch, attention metadata, and which rows want logits.

Pure construction on the host; one copy to the device per tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from decodefleet.kernels.ops import AttentionMetadata

from ..batcher import Chunk


@dataclass(frozen=True)
class ModelInput:
    """tokens_T: ids. sample_rows: row of each sampling chunk's last token, in the plan's order."""

    tokens_T: Tensor
    meta: AttentionMetadata
    sample_rows: Tensor


def build_input(chunks: tuple[Chunk, ...], block_size: int, device: torch.device) -> ModelInput:
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    query_start, context, rows = [0], [], []
    for chunk in chunks:
        seq, end = chunk.seq, chunk.start + chunk.count
        tokens += seq.tokens[chunk.start : end]
        positions += range(chunk.start, end)
        slots += _slots(seq.blocks, chunk.start, end, block_size)
        query_start.append(len(tokens))
        context.append(end)
        if chunk.samples:
            rows.append(len(tokens) - 1)
    meta = AttentionMetadata(
        query_start_B1=torch.tensor(query_start, dtype=torch.int32, device=device),
        context_B=torch.tensor(context, dtype=torch.int32, device=device),
        block_table_BM=_block_table(chunks, context, block_size).to(device),
        positions_T=torch.tensor(positions, dtype=torch.int64, device=device),
        slots_T=torch.tensor(slots, dtype=torch.int64, device=device),
        max_query=max(chunk.count for chunk in chunks),
        max_context=max(context),
    )
    return ModelInput(
        tokens_T=torch.tensor(tokens, dtype=torch.int64, device=device),
        meta=meta,
        sample_rows=torch.tensor(rows, dtype=torch.int64, device=device),
    )


def _slots(blocks: list[int], start: int, end: int, block_size: int) -> list[int]:
    return [blocks[p // block_size] * block_size + p % block_size for p in range(start, end)]


def _block_table(chunks: tuple[Chunk, ...], context: list[int], block_size: int) -> Tensor:
    """int32 [B, M]; rows shorter than the longest repeat their first block."""
    used = [-(-tokens // block_size) for tokens in context]
    width = max(used)
    table = [
        chunk.seq.blocks[:count] + chunk.seq.blocks[:1] * (width - count)
        for chunk, count in zip(chunks, used, strict=True)
    ]
    return torch.tensor(table, dtype=torch.int32)
