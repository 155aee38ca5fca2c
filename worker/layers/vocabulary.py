"""The two ends of a model: from tokens to the residual stream, and from there to logits.

Each rank has the rows of its own span of the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decodefleet.kernels import ops

from ..parallel.ranks import Ranks
from .linear import Linear, LinearOptions


class Embedding:
    """table_VD: the rank's rows. tokens: of the whole vocabulary."""

    def __init__(self, table_VD: Tensor, tokens: int, ranks: Ranks, scale: float = 1.0) -> None:
        self.table_VD = table_VD
        self._scale = scale
        self._ranks = ranks
        self._part = ranks.shard.vocabulary(tokens)

    def __call__(self, tokens_T: Tensor) -> Tensor:
        """Rows times scale, fp32 [T, hidden]."""
        if self._part is None:
            return ops.embed(tokens_T, self.table_VD, self._scale)
        # one rank has the row, and to the zeros of the others it adds up exactly
        return self._ranks.sum(ops.embed(tokens_T, self.table_VD, self._scale, self._part.start))


class Head:
    """table_VD: the rank's rows. tokens: of the whole vocabulary."""

    def __init__(self, table_VD: Tensor, tokens: int, options: LinearOptions) -> None:
        self._linear = Linear([table_VD], [], options, out_dtype=torch.float32)
        self._ranks = options.ranks
        self._tokens = tokens

    def __call__(self, hidden_RD: Tensor) -> Tensor:
        """fp32 [R, tokens]; on other ranks than 0 only their own columns."""
        shard = self._ranks.shard
        return self._ranks.join_columns(
            self._linear(hidden_RD), shard.most_tokens(self._tokens), self._tokens
        )
