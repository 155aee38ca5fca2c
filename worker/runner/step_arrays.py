"""A step in arrays and a few numbers: what every rank must know of it to compute its part. No objects of the
batcher, so that it travels as it is.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .batch import BatchArrays
from .graphs import Bucket

Array = NDArray[Any]


@dataclass(frozen=True)
class StepArrays:
    """bucket: the recording that runs the step, whose shape `batch` has; None for a step that runs eagerly.

    chunks: sequences in the step. decodes: those at the front that have one token; max_query: most tokens.
    samples: tokens that are sampled.
    feed_2F: tokens to be filled in, and rows of the last step's samples. copies_2C: blocks, from and to.
    hidden_S: which hidden states are sampled from; empty for all. scored_S2: first row and number of rows
        whose logits are wanted besides.
    """

    batch: BatchArrays
    bucket: Bucket | None
    chunks: int
    max_query: int
    decodes: int
    samples: int
    feed_2F: Array
    copies_2C: Array
    hidden_S: Array
    scored_S2: Array

    def pack(self) -> tuple[list[int], list[Array]]:
        rows, context = (0, 0) if self.bucket is None else (self.bucket.rows, self.bucket.context)
        numbers = [rows, context, self.chunks, self.max_query, self.decodes, self.samples]
        extras = [self.feed_2F, self.copies_2C, self.hidden_S, self.scored_S2]
        return [*numbers, *self.batch.max_context], [*self.batch.arrays, *extras]

    @staticmethod
    def unpack(numbers: Rows[int], arrays: Rows[Array]) -> StepArrays:
        rows, context, chunks, max_query, decodes, samples = numbers[:6]
        feed_2F, copies_2C, hidden_S, scored_S2 = arrays[-4:]
        ids_NT, query_start_B1, context_FB, *tables = arrays[:-4]
        return StepArrays(
            batch=BatchArrays(
                ids_NT, query_start_B1, context_FB, tables=tuple(tables), max_context=tuple(numbers[6:])
            ),
            bucket=Bucket(rows, context) if rows else None,
            chunks=chunks,
            max_query=max_query,
            decodes=decodes,
            samples=samples,
            feed_2F=feed_2F,
            copies_2C=copies_2C,
            hidden_S=hidden_S,
            scored_S2=scored_S2,
        )


def pairs(values: Rows[tuple[int, int]]) -> Array:
    """int64 [2, n]; mostly there are none, and one empty array does for all."""
    return np.array(values, dtype=np.int64).T.copy() if values else _NO_PAIRS


_NO_PAIRS = np.zeros((2, 0), dtype=np.int64)
