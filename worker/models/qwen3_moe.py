"""Qwen 3 with a mixture of experts in all layers, or in some: attention as in Qwen 3."""

from __future__ import annotations

from ..assets.checkpoint import ModelInfo
from ..assets.errors import ModelError
from ..layers.linear import LinearOptions
from .llama import LlamaMlp, Mlp
from .qwen3 import Qwen3Model
from .sparse_mlp import ExpertNames, SparseMlp, number_of
from .weights import Weights

NAMES = ExpertNames("mlp", "gate_proj", "up_proj", "down_proj")


class Qwen3MoeModel(Qwen3Model):
    """Token ids in, logits out."""

    def make_mlp(self, info: ModelInfo, layer: int, weights: Weights, linear: LinearOptions) -> Mlp:
        step = info.raw.get("decoder_sparse_step", 1)
        if layer in (info.raw.get("mlp_only_layers") or ()) or (layer + 1) % step:
            return LlamaMlp(info, layer, weights, linear)
        renormalise = bool(info.raw.get("norm_topk_prob", False))
        inner, ranks = number_of(info, "moe_intermediate_size"), linear.ranks.shard.size
        if inner % ranks:
            raise ModelError(
                f"Experts of {inner} numbers cannot be divided among {ranks} ranks.",
                "Choose a tensor-parallel size that divides it.",
            )
        return SparseMlp(info, layer, weights, linear, NAMES, inner // ranks, renormalise)
