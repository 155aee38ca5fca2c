"""What a model family has to offer the runner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from decodefleet.kernels.ops import AttentionMetadata, KvCache

from ..assets.checkpoint import ModelInfo
from ..kv.groups import KvGroups
from ..layers.linear import LinearOptions
from .weights import Weights

# of each KV group
Metas = Sequence[AttentionMetadata]


class Model(Protocol):
    """A decoder: token ids in, logits out."""

    def __init__(
        self,
        info: ModelInfo,
        groups: KvGroups,
        weights: Weights,
        max_positions: int | None,
        device: torch.device,
        linear: LinearOptions,
    ) -> None:
        """max_positions: tokens of a sequence, None for no limit.

        Raises ModelError for weights that are not as `info` says.
        """

    def forward(self, tokens_T: Tensor, positions_T: Tensor, kv: KvCache, metas: Metas) -> Tensor:
        """Final hidden states [T, D], normed; the step's keys and values are in `kv` afterwards."""

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """fp32 [R, V]."""
