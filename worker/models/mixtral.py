"""Mixtral: as Llama, with a mixture of experts in all layers."""

from __future__ import annotations

from ..assets.checkpoint import ModelInfo
from ..assets.experts import mixture
from ..layers.linear import LinearOptions
from .llama import LlamaModel, Mlp
from .sparse_mlp import ExpertNames, SparseMlp
from .weights import Weights

NAMES = ExpertNames("block_sparse_moe", "w1", "w3", "w2")


class MixtralModel(LlamaModel):
    """Token ids in, logits out."""

    def make_mlp(self, info: ModelInfo, layer: int, weights: Weights, linear: LinearOptions) -> Mlp:
        found = mixture(info)
        assert found is not None
        return SparseMlp(info, layer, weights, linear, NAMES, found, renormalise=True)
