"""Qwen 3: as Llama, with norms of query and key heads.

Shape suffixes as in `llama.py`.
"""

from __future__ import annotations

from ..assets.checkpoint import ModelInfo
from ..kv.groups import KvGroups
from ..layers.linear import LinearOptions
from .llama import LlamaAttention, LlamaModel
from .projections import head_norms
from .weights import Weights


class Qwen3Attention(LlamaAttention):
    def __init__(
        self, info: ModelInfo, layer: int, groups: KvGroups, weights: Weights, linear: LinearOptions
    ) -> None:
        super().__init__(info, layer, groups, weights, linear)
        self.head_norms = head_norms(info, f"model.layers.{layer}.self_attn", weights)


class Qwen3Model(LlamaModel):
    """Token ids in, logits out."""

    attention = Qwen3Attention
