"""From a plan to arrays: the flat batch, attention metadata, and which tokens the device itself must fill in.

Pure construction on the host, in numpy. Sending is `buffers.py`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from decodefleet.kernels.ops import AttentionMetadata

from ..batcher import Chunk
from ..kv.groups import KvGroups
from ..sequence import Sequence
from .block_tables import BlockTables


@dataclass(frozen=True)
class BatchArrays:
    """What the model reads; meanings are those of `AttentionMetadata`.

    ids_NT: tokens; positions in each frame (see `kv.groups`), frame 0 first; slots in each KV group.
    context_FB: of each frame. tables: of each group, [B, M] with an M of its own. max_context: of each frame.
    """

    ids_NT: NDArray[np.int64]
    query_start_B1: NDArray[np.int32]
    context_FB: NDArray[np.int32]
    tables: tuple[NDArray[np.int32], ...]
    max_context: tuple[int, ...]

    @property
    def arrays(self) -> list[NDArray[Any]]:
        """As they are sent. A graph reads these at fixed addresses, so they lead whatever else is."""
        return [self.ids_NT, self.query_start_B1, self.context_FB, *self.tables]


@dataclass(frozen=True)
class ModelInput:
    """positions_T: in the sequence. metas: of each KV group."""

    tokens_T: Tensor
    positions_T: Tensor
    metas: tuple[AttentionMetadata, ...]


def lay_out(
    chunks: tuple[Chunk, ...], tables: BlockTables, block_size: int, previous: Mapping[Sequence, int]
) -> tuple[BatchArrays, NDArray[np.int64]]:
    """The batch, and int64 [2, F]: F of its tokens, and where among the last step's samples each is found.

    previous: row in the last step's samples, of each sequence whose newest token is in flight.
    """
    tokens: list[int] = []
    positions: list[int] = []
    query_start, context, fed, sampled = [0], [], [], []
    # lists, since a step on CPU leaves the caches cold, where each call of numpy costs many microseconds
    for chunk in chunks:
        seq, start, end = chunk.seq, chunk.start, chunk.start + chunk.count
        tokens += seq.tokens[start:end]
        if end > len(seq.tokens):
            fed.append(len(tokens))
            sampled.append(previous[seq])
            tokens.append(0)
        positions += range(start, end)
        query_start.append(len(tokens))
        context.append(end)
    frames = [(positions, context), *(_frame(chunks, group, block_size) for group in tables.groups.windowed)]
    slots = [_slots(chunks, group, block_size) for group in range(len(tables.groups))]
    longest = tuple(max(ends) for _, ends in frames)
    batch = BatchArrays(
        np.array([tokens, *(places for places, _ in frames), *slots]),
        np.array(query_start, dtype=np.int32),
        np.array([ends for _, ends in frames], dtype=np.int32),
        tables.gather(chunks, [-(-tokens // block_size) for tokens in longest]),
        longest,
    )
    return batch, np.array([fed, sampled], dtype=np.int64)


def _frame(chunks: tuple[Chunk, ...], group: int, block_size: int) -> tuple[list[int], list[int]]:
    """Positions and contexts without what the group's lists dropped."""
    positions: list[int] = []
    context = []
    for chunk in chunks:
        start = chunk.start - chunk.seq.blocks[group].dropped * block_size
        positions += range(start, start + chunk.count)
        context.append(start + chunk.count)
    return positions, context


def _slots(chunks: tuple[Chunk, ...], group: int, block_size: int) -> list[int]:
    """Where each token's key and value go."""
    slots: list[int] = []
    for chunk in chunks:
        own, start = chunk.seq.blocks[group], chunk.start
        blocks, dropped = own.ids, own.dropped
        # most chunks are a single token
        if chunk.count == 1:
            slots.append(blocks[start // block_size - dropped] * block_size + start % block_size)
        else:
            span = range(start, start + chunk.count)
            slots += [blocks[p // block_size - dropped] * block_size + p % block_size for p in span]
    return slots


def empty_batch(groups: KvGroups) -> BatchArrays:
    """No sequences."""
    frames, nothing = 1 + len(groups.windowed), np.zeros((0, 0), dtype=np.int32)
    return BatchArrays(
        np.zeros((1 + frames + len(groups), 0), dtype=np.int64),
        np.zeros(0, dtype=np.int32),
        np.zeros((frames, 0), dtype=np.int32),
        (nothing,) * len(groups),
        (0,) * frames,
    )


def pad_decode(
    batch: BatchArrays, rows: int, widths: Rows[int], *, scratch: int, block_size: int
) -> BatchArrays:
    """A batch of single tokens in the shape of a larger one; the rows added write to the block `scratch`.

    rows: sequences; widths: blocks of a row of each group's table.
    """
    N, B = batch.ids_NT.shape
    ids_NT = np.zeros((N, rows), dtype=np.int64)
    ids_NT[:, :B] = batch.ids_NT
    ids_NT[N - len(batch.tables) :, B:] = scratch * block_size
    context_FB = np.ones((len(batch.context_FB), rows), dtype=np.int32)
    context_FB[:, :B] = batch.context_FB
    tables = []
    for width, table_BM in zip(widths, batch.tables, strict=True):
        padded_BM = np.full((rows, width), scratch, dtype=np.int32)
        padded_BM[:B, : table_BM.shape[1]] = table_BM
        tables.append(padded_BM)
    query_start_B1 = np.arange(rows + 1, dtype=np.int32)
    return BatchArrays(ids_NT, query_start_B1, context_FB, tuple(tables), batch.max_context)


def leading_decodes(chunks: tuple[Chunk, ...]) -> int:
    """Chunks of one token at the front, where the batcher puts sequences that decode."""
    return next((i for i, chunk in enumerate(chunks) if chunk.count > 1), len(chunks))


def as_input(
    tensors: Rows[Tensor], groups: KvGroups, *, max_query: int, max_context: Rows[int], decodes: int
) -> ModelInput:
    """tensors: `BatchArrays.arrays`, on the device. max_context: of each frame. The maxima may be bounds."""
    ids_NT, query_start_B1, context_FB, *tables = tensors
    tokens_T, *rest = ids_NT.unbind()
    positions_FT, slots_GT = rest[: len(context_FB)], rest[len(context_FB) :]
    metas = tuple(
        AttentionMetadata(
            query_start_B1=query_start_B1,
            context_B=context_FB[frame],
            block_table_BM=table_BM,
            positions_T=positions_FT[frame],
            slots_T=slots_T,
            max_query=max_query,
            max_context=max_context[frame],
            decodes=decodes,
        )
        for frame, slots_T, table_BM in zip(groups.frames, slots_GT, tables, strict=True)
    )
    return ModelInput(tokens_T, positions_FT[0], metas)
