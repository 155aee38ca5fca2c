"""Log-probabilities of prompt tokens, for requests that ask how likely their prompt is."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Rows
from itertools import accumulate, chain

import numpy as np
from torch import Tensor

from decodefleet.kernels import ops

from ..batcher import Chunk
from .buffers import Array
from .logprobs import concatenate
from .step import Scored


def scored_tokens(chunk: Chunk) -> list[int]:
    """The prompt tokens behind each of the chunk's, where the request wants them scored."""
    seq = chunk.seq
    if seq.request.params.prompt_logprobs is None:
        return []
    return seq.tokens[chunk.start + 1 : min(chunk.start + chunk.count + 1, seq.prompt_len)]


def joined(scored: Rows[list[int]]) -> Array:
    """All tokens in a row. scored: each chunk's `scored_tokens`."""
    return np.array([*chain.from_iterable(scored)], dtype=np.int64) if any(scored) else _NONE


def scored_spans(chunks: Rows[Chunk], scored: Rows[list[int]]) -> Array:
    """int64 [n, 2]: the first row and the number of rows of each chunk that has any to score."""
    if not any(scored):
        return _NO_SPANS
    firsts = accumulate((chunk.count for chunk in chunks), initial=0)
    spans = [(first, len(tokens)) for first, tokens in zip(firsts, scored, strict=False) if tokens]
    return np.array(spans, dtype=np.int64)


def score_prompts(
    pieces: Iterator[Tensor], chunks: Rows[Chunk], scored: Rows[list[int]], targets_G: Tensor
) -> list[Scored]:
    """Each prompt token under the logits of the row before it.

    pieces: logits of these rows, chunk by chunk, in pieces of any size. targets_G: the tokens, in a row.
    """
    found, first = [], 0
    for chunk, tokens in zip(chunks, scored, strict=True):
        if tokens:
            top, end, parts = chunk.seq.request.params.prompt_logprobs or 0, first + len(tokens), []
            while first < end:
                logits_RV = next(pieces)
                rows = logits_RV.shape[0]
                parts.append(ops.token_logprobs(logits_RV, targets_G[first : first + rows], top))
                first += rows
            found.append(Scored(chunk.seq, tokens, top, concatenate(parts)))
    return found


_NONE = np.zeros(0, dtype=np.int64)
_NO_SPANS = np.zeros((0, 2), dtype=np.int64)
