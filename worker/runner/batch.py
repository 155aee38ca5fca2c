"""From a plan to arrays: the flat batch, attention metadata, and which tokens the device itself must fill in.

Pure construction on the host, in numpy. Sending is `buffers.py`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from decodefleet.kernels.ops import AttentionMetadata

from ..batcher import Chunk
from ..sequence import Sequence
from .block_tables import BlockTables


class BatchArrays(NamedTuple):
    """What the model reads; meanings are those of `AttentionMetadata`.

    ids_NT: tokens, positions, and the slots in each KV group. tables_GBM: the block table of each.
    A graph reads these at fixed addresses, so they lead whatever else is sent.
    """

    ids_NT: NDArray[np.int64]
    query_start_B1: NDArray[np.int32]
    context_B: NDArray[np.int32]
    tables_GBM: NDArray[np.int32]


@dataclass(frozen=True)
class ModelInput:
    """metas: of each KV group."""

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
    slots: list[list[int]] = [[] for _ in range(tables.groups)]
    query_start, context, fed, sampled = [0], [], [], []
    # lists, since a step on CPU leaves the caches cold, where each call of numpy costs many microseconds
    for chunk in chunks:
        seq, start, count = chunk.seq, chunk.start, chunk.count
        end = start + count
        tokens += seq.tokens[start:end]
        if end > len(seq.tokens):
            fed.append(len(tokens))
            sampled.append(previous[seq])
            tokens.append(0)
        positions += range(start, end)
        # most chunks are a single token
        block, offset = divmod(start, block_size)
        for own, places in zip(seq.blocks, slots, strict=True):
            blocks = own.ids
            if count == 1:
                places.append(blocks[block] * block_size + offset)
            else:
                places += [blocks[p // block_size] * block_size + p % block_size for p in range(start, end)]
        query_start.append(len(tokens))
        context.append(end)
    batch = BatchArrays(
        np.array([tokens, positions, *slots]),
        np.array(query_start, dtype=np.int32),
        np.array(context, dtype=np.int32),
        tables.gather(chunks, -(-max(context) // block_size)),
    )
    return batch, np.array([fed, sampled], dtype=np.int64)


def empty_batch(groups: int) -> BatchArrays:
    """No sequences."""
    counts, tables = np.zeros(0, dtype=np.int32), np.zeros((groups, 0, 0), dtype=np.int32)
    return BatchArrays(np.zeros((2 + groups, 0), dtype=np.int64), counts, counts, tables)


def pad_decode(batch: BatchArrays, rows: int, width: int, *, scratch: int, block_size: int) -> BatchArrays:
    """A batch of single tokens in the shape of a larger one; the rows added write to the block `scratch`.

    rows: sequences; width: blocks of a row of the table.
    """
    G, B, M = batch.tables_GBM.shape
    ids_NT = np.zeros((2 + G, rows), dtype=np.int64)
    ids_NT[:, :B] = batch.ids_NT
    ids_NT[2:, B:] = scratch * block_size
    context_B = np.ones(rows, dtype=np.int32)
    context_B[:B] = batch.context_B
    tables_GBM = np.full((G, rows, width), scratch, dtype=np.int32)
    tables_GBM[:, :B, :M] = batch.tables_GBM
    return BatchArrays(ids_NT, np.arange(rows + 1, dtype=np.int32), context_B, tables_GBM)


def leading_decodes(chunks: tuple[Chunk, ...]) -> int:
    """Chunks of one token at the front, where the batcher puts sequences that decode."""
    return next((i for i, chunk in enumerate(chunks) if chunk.count > 1), len(chunks))


def as_input(tensors: list[Tensor], *, max_query: int, max_context: int, decodes: int) -> ModelInput:
    """tensors: those of BatchArrays, on the device. The maxima may be bounds."""
    ids_NT, query_start_B1, context_B, tables_GBM = tensors
    tokens_T, positions_T, *slots_GT = ids_NT.unbind()
    metas = tuple(
        AttentionMetadata(
            query_start_B1=query_start_B1,
            context_B=context_B,
            block_table_BM=block_table_BM,
            positions_T=positions_T,
            slots_T=slots_T,
            max_query=max_query,
            max_context=max_context,
            decodes=decodes,
        )
        for slots_T, block_table_BM in zip(slots_GT, tables_GBM.unbind(), strict=True)
    )
    return ModelInput(tokens_T, positions_T, metas)
