"""Log-probabilities of prompt tokens, for requests that ask how likely their prompt is."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows

from torch import Tensor

from decodefleet.kernels import ops

from ..batcher import Chunk
from .logprobs import concatenate
from .step import Scored

# rows of logits held at once
SCORED_ROWS = 64


def scored_tokens(chunk: Chunk) -> list[int]:
    """The prompt tokens behind each of the chunk's, where the request wants them scored."""
    seq = chunk.seq
    if seq.request.params.prompt_logprobs is None:
        return []
    return seq.tokens[chunk.start + 1 : min(chunk.start + chunk.count + 1, seq.prompt_len)]


def score_prompts(
    logits_of: Callable[[Tensor], Tensor], chunks: Rows[Chunk], hidden_TD: Tensor, targets_G: Tensor
) -> list[Scored]:
    """Each prompt token under the logits of the row before it; targets_G: all chunks' `scored_tokens`."""
    scored, row, first = [], 0, 0
    for chunk in chunks:
        tokens = scored_tokens(chunk)
        if tokens:
            top = chunk.seq.request.params.prompt_logprobs or 0
            hidden = hidden_TD[row : row + len(tokens)].split(SCORED_ROWS)
            targets = targets_G[first : first + len(tokens)].split(SCORED_ROWS)
            parts = [ops.token_logprobs(logits_of(h), t, top) for h, t in zip(hidden, targets, strict=True)]
            scored.append(Scored(chunk.seq, tokens, top, concatenate(parts)))
        row, first = row + chunk.count, first + len(tokens)
    return scored
