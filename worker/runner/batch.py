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
    """What the model reads; meanings are those of `AttentionMetadata`. ids_3T: tokens, positions, slots.

    A graph reads these at fixed addresses, so they lead whatever else is sent.
    """

    ids_3T: NDArray[np.int64]
    query_start_B1: NDArray[np.int32]
    context_B: NDArray[np.int32]
    block_table_BM: NDArray[np.int32]


@dataclass(frozen=True)
class ModelInput:
    tokens_T: Tensor
    meta: AttentionMetadata


def lay_out(
    chunks: tuple[Chunk, ...], tables: BlockTables, block_size: int, previous: Mapping[Sequence, int]
) -> tuple[BatchArrays, NDArray[np.int64]]:
    """The batch, and int64 [2, F]: F of its tokens, and where among the last step's samples each is found.

    previous: row in the last step's samples, of each sequence whose newest token is in flight.
    """
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    query_start, context, fed, sampled = [0], [], [], []
    # lists, since a step on CPU leaves the caches cold, where each call of numpy costs many microseconds
    for chunk in chunks:
        seq, span = chunk.seq, range(chunk.start, chunk.start + chunk.count)
        blocks = seq.blocks
        tokens += seq.tokens[span.start : span.stop]
        if span.stop > len(seq.tokens):
            fed.append(len(tokens))
            sampled.append(previous[seq])
            tokens.append(0)
        positions += span
        slots += [blocks[p // block_size] * block_size + p % block_size for p in span]
        query_start.append(len(tokens))
        context.append(span.stop)
    batch = BatchArrays(
        np.array([tokens, positions, slots]),
        np.array(query_start, dtype=np.int32),
        np.array(context, dtype=np.int32),
        tables.gather(chunks, -(-max(context) // block_size)),
    )
    return batch, np.array([fed, sampled], dtype=np.int64)


def empty_batch() -> BatchArrays:
    """No sequences."""
    counts = np.zeros(0, dtype=np.int32)
    return BatchArrays(np.zeros((3, 0), dtype=np.int64), counts, counts, np.zeros((0, 0), dtype=np.int32))


def pad_decode(batch: BatchArrays, rows: int, width: int, *, scratch: int, block_size: int) -> BatchArrays:
    """A batch of single tokens in the shape of a larger one; the rows added write to the block `scratch`.

    rows: sequences; width: blocks of a row of the table.
    """
    B, M = batch.block_table_BM.shape
    ids_3T = np.zeros((3, rows), dtype=np.int64)
    ids_3T[:, :B] = batch.ids_3T
    ids_3T[2, B:] = scratch * block_size
    context_B = np.ones(rows, dtype=np.int32)
    context_B[:B] = batch.context_B
    table_BM = np.full((rows, width), scratch, dtype=np.int32)
    table_BM[:B, :M] = batch.block_table_BM
    return BatchArrays(ids_3T, np.arange(rows + 1, dtype=np.int32), context_B, table_BM)


def leading_decodes(chunks: tuple[Chunk, ...]) -> int:
    """Chunks of one token at the front, where the batcher puts sequences that decode."""
    return next((i for i, chunk in enumerate(chunks) if chunk.count > 1), len(chunks))


def as_input(tensors: list[Tensor], *, max_query: int, max_context: int, decodes: int) -> ModelInput:
    """tensors: those of BatchArrays, on the device. The maxima may be bounds."""
    ids_3T, query_start_B1, context_B, block_table_BM = tensors
    tokens_T, positions_T, slots_T = ids_3T.unbind()
    meta = AttentionMetadata(
        query_start_B1=query_start_B1,
        context_B=context_B,
        block_table_BM=block_table_BM,
        positions_T=positions_T,
        slots_T=slots_T,
        max_query=max_query,
        max_context=max_context,
        decodes=decodes,
    )
    return ModelInput(tokens_T, meta)
