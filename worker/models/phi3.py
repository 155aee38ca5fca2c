"""Phi 3 and Phi 4: as Llama, from checkpoints that pack projections with one input into one tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from ..assets.checkpoint import ModelInfo
from ..kv.groups import KvGroups
from ..layers.linear import LinearOptions
from ..parallel.shard import Part, Shard
from .llama import LlamaModel
from .weights import Weights


class Phi3Model(LlamaModel):
    """Token ids in, logits out."""

    def __init__(
        self,
        info: ModelInfo,
        groups: KvGroups,
        weights: Weights,
        max_positions: int | None,
        device: torch.device,
        linear: LinearOptions,
    ) -> None:
        super().__init__(
            info, groups, UnpackedWeights(info, weights, linear.ranks.shard), max_positions, device, linear
        )


class UnpackedWeights:
    """Single projections, as rows of the packed tensors; all other weights as they are."""

    def __init__(self, info: ModelInfo, weights: Weights, shard: Shard) -> None:
        """info: the model as this rank sees it."""
        q, kv = info.heads * info.head_dim * shard.size, info.kv_heads * info.head_dim * shard.kv_parts
        inner = info.intermediate_size * shard.size
        # packed name, first row, all rows
        self._places = {
            "q_proj": ("qkv_proj", 0, q + 2 * kv),
            "k_proj": ("qkv_proj", q, q + 2 * kv),
            "v_proj": ("qkv_proj", q + kv, q + 2 * kv),
            "gate_proj": ("gate_up_proj", 0, 2 * inner),
            "up_proj": ("gate_up_proj", inner, 2 * inner),
        }
        self._weights = weights
        self.dtype, self.folder = weights.dtype, weights.folder

    def has(self, name: str) -> bool:
        return self._weights.has(self._packed(name)[0])

    def take(self, name: str, *shape: int, part: Part | None = None) -> Tensor:
        packed, first, rows = self._packed(name)
        if rows:
            start = first if part is None else first + part.start
            part = Part(0, start, start + shape[0], rows)
        return self._weights.take(packed, *shape, part=part)

    def _packed(self, name: str) -> tuple[str, int, int]:
        module, _, kind = name.rpartition(".")
        parent, _, projection = module.rpartition(".")
        packed, first, rows = self._places.get(projection, ("", 0, 0))
        return (f"{parent}.{packed}.{kind}", first, rows) if rows else (name, 0, 0)
