"""Log-probabilities of prompt tokens, for requests that ask how likely their prompt is."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Rows

from torch import Tensor

from decodefleet.kernels import ops

from ..batcher import Chunk
from .logprobs import concatenate
from .step import Scored


def scored_tokens(chunk: Chunk) -> list[int]:
    """The prompt tokens behind each of the chunk's, where the request wants them scored."""
    seq = chunk.seq
    if seq.request.params.prompt_logprobs is None:
        return []
    return seq.tokens[chunk.start + 1 : min(chunk.start + chunk.count + 1, seq.prompt_len)]


def score_prompts(pieces: Iterator[Tensor], chunks: Rows[Chunk], targets_G: Tensor) -> list[Scored]:
    """Each prompt token under the logits of the row before it.

    pieces: logits of these rows, chunk by chunk, in pieces of any size. targets_G: all `scored_tokens`.
    """
    scored, first = [], 0
    for chunk in chunks:
        tokens = scored_tokens(chunk)
        if tokens:
            top, end, parts = chunk.seq.request.params.prompt_logprobs or 0, first + len(tokens), []
            while first < end:
                logits_RV = next(pieces)
                rows = logits_RV.shape[0]
                parts.append(ops.token_logprobs(logits_RV, targets_G[first : first + rows], top))
                first += rows
            scored.append(Scored(chunk.seq, tokens, top, concatenate(parts)))
    return scored
