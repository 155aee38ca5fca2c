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
from .buffers import Array


class BatchArrays(NamedTuple):
    """What the model reads; shapes and meanings are those of `AttentionMetadata`.

    A graph reads these at fixed addresses, so they lead whatever else is sent.
    """

    tokens_T: NDArray[np.int64]
    positions_T: NDArray[np.int64]
    slots_T: NDArray[np.int64]
    query_start_B1: NDArray[np.int32]
    context_B: NDArray[np.int32]
    block_table_BM: NDArray[np.int32]


class TokenFeed(NamedTuple):
    """Tokens that the step before sampled: `rows_F` of the flat batch take `sources_F` of its samples."""

    rows_F: NDArray[np.int64]
    sources_F: NDArray[np.int64]


@dataclass(frozen=True)
class ModelInput:
    tokens_T: Tensor
    meta: AttentionMetadata


def lay_out(
    chunks: tuple[Chunk, ...], tables: BlockTables, block_size: int, previous: Mapping[Sequence, int]
) -> tuple[BatchArrays, TokenFeed]:
    """previous: row in the last step's samples, of each sequence whose newest token is in flight."""
    start_B = np.array([chunk.start for chunk in chunks], dtype=np.int64)
    count_B = np.array([chunk.count for chunk in chunks], dtype=np.int64)
    context_B = start_B + count_B
    query_start_B1 = np.zeros(len(chunks) + 1, dtype=np.int64)
    np.cumsum(count_B, out=query_start_B1[1:])
    table_BM = tables.gather(chunks, -(-int(context_B.max()) // block_size))
    seq_T = np.repeat(np.arange(len(chunks)), count_B)
    positions_T = np.arange(query_start_B1[-1]) + np.repeat(start_B - query_start_B1[:-1], count_B)
    tokens, feed = _tokens(chunks, previous)
    arrays = BatchArrays(
        tokens_T=np.array(tokens, dtype=np.int64),
        positions_T=positions_T,
        slots_T=table_BM[seq_T, positions_T // block_size] * np.int64(block_size) + positions_T % block_size,
        query_start_B1=query_start_B1.astype(np.int32),
        context_B=context_B.astype(np.int32),
        block_table_BM=table_BM,
    )
    return arrays, feed


def _tokens(chunks: tuple[Chunk, ...], previous: Mapping[Sequence, int]) -> tuple[list[int], TokenFeed]:
    """The flat batch's tokens, 0 for those in flight."""
    tokens: list[int] = []
    rows, sources = [], []
    for chunk in chunks:
        seq, end = chunk.seq, chunk.start + chunk.count
        tokens += seq.tokens[chunk.start : end]
        if end > len(seq.tokens):
            rows.append(len(tokens))
            sources.append(previous[seq])
            tokens.append(0)
    return tokens, TokenFeed(np.array(rows, dtype=np.int64), np.array(sources, dtype=np.int64))


def empty_batch() -> BatchArrays:
    """No sequences."""
    ids, counts = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int32)
    return BatchArrays(ids, ids, ids, np.zeros(1, dtype=np.int32), counts, np.zeros((0, 0), dtype=np.int32))


def pad_decode(batch: BatchArrays, rows: int, width: int, *, scratch: int, block_size: int) -> BatchArrays:
    """A batch of single tokens in the shape of a larger one; the rows added write to the block `scratch`.

    rows: sequences; width: blocks of a row of the table.
    """
    B, M = batch.block_table_BM.shape
    table_BM = np.full((rows, width), scratch, dtype=np.int32)
    table_BM[:B, :M] = batch.block_table_BM

    def padded(values: Array, filler: int) -> Array:
        return np.concatenate((values, np.full(rows - B, filler, dtype=values.dtype)))

    return BatchArrays(
        tokens_T=padded(batch.tokens_T, 0),
        positions_T=padded(batch.positions_T, 0),
        slots_T=padded(batch.slots_T, scratch * block_size),
        query_start_B1=np.arange(rows + 1, dtype=np.int32),
        context_B=padded(batch.context_B, 1),
        block_table_BM=table_BM,
    )


def leading_decodes(chunks: tuple[Chunk, ...]) -> int:
    """Chunks of one token at the front, where the batcher puts sequences that decode."""
    return next((i for i, chunk in enumerate(chunks) if chunk.count > 1), len(chunks))


def as_input(tensors: list[Tensor], *, max_query: int, max_context: int, decodes: int) -> ModelInput:
    """tensors: those of BatchArrays, on the device. The maxima may be bounds."""
    tokens_T, positions_T, slots_T, query_start_B1, context_B, block_table_BM = tensors
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
