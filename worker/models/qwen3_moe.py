"""Qwen 3 with a mixture of experts in all layers, or in some: attention as in Qwen 3."""

from __future__ import annotations

from ..assets.checkpoint import ModelInfo
from ..assets.experts import mixture
from ..layers.linear import LinearOptions
from .llama import LlamaMlp, Mlp
from .qwen3 import Qwen3Model
from .sparse_mlp import ExpertNames, SparseMlp
from .weights import Weights

NAMES = ExpertNames("mlp", "gate_proj", "up_proj", "down_proj")


class Qwen3MoeModel(Qwen3Model):
    """Token ids in, logits out."""

    def make_mlp(self, info: ModelInfo, layer: int, weights: Weights, linear: LinearOptions) -> Mlp:
        found = mixture(info)
        if found is None or layer not in found.layers:
            return LlamaMlp(info, layer, weights, linear)
        renormalise = bool(info.raw.get("norm_topk_prob", False))
        return SparseMlp(info, layer, weights, linear, NAMES, found, renormalise=renormalise)
