"""Phi 3 and Phi 4: as Llama, from checkpoints that pack projections with one input into one tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from ..assets.checkpoint import ModelInfo
from ..kv.groups import KvGroups
from ..layers.linear import LinearOptions
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
        super().__init__(info, groups, UnpackedWeights(info, weights), max_positions, device, linear)


class UnpackedWeights:
    """Single projections, as rows of the packed tensors; all other weights as they are."""

    def __init__(self, info: ModelInfo, weights: Weights) -> None:
        q, kv, inner = info.heads * info.head_dim, info.kv_heads * info.head_dim, info.intermediate_size
        # packed name, first row, all rows
        self._parts = {
            "q_proj": ("qkv_proj", 0, q + 2 * kv),
            "k_proj": ("qkv_proj", q, q + 2 * kv),
            "v_proj": ("qkv_proj", q + kv, q + 2 * kv),
            "gate_proj": ("gate_up_proj", 0, 2 * inner),
            "up_proj": ("gate_up_proj", inner, 2 * inner),
        }
        self._weights = weights
        # the parts of a tensor are asked for one after the other
        self._last: tuple[str, Tensor | None] = "", None

    def has(self, name: str) -> bool:
        return self._weights.has(self._packed(name)[0])

    def take(self, name: str, *shape: int) -> Tensor:
        packed, first, rows = self._packed(name)
        if not rows:
            return self._weights.take(name, *shape)
        if self._last[0] != packed:
            self._last = packed, self._weights.take(packed, rows, *shape[1:])
        tensor = self._last[1]
        assert tensor is not None
        return tensor[first : first + shape[0]]

    def _packed(self, name: str) -> tuple[str, int, int]:
        module, _, kind = name.rpartition(".")
        parent, _, projection = module.rpartition(".")
        packed, first, rows = self._parts.get(projection, ("", 0, 0))
        return (f"{parent}.{packed}.{kind}", first, rows) if rows else (name, 0, 0)
