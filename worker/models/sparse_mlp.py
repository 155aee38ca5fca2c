"""The MLP of a mixture of experts, from the names that a family gives its weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..assets.checkpoint import ModelInfo
from ..assets.errors import ModelError
from ..assets.experts import Mixture
from ..layers.experts import Experts, RouterOptions
from ..layers.linear import LinearOptions
from ..layers.norm import RmsNorm
from .weights import Weights


@dataclass(frozen=True)
class ExpertNames:
    """Below a layer's prefix: of the block, and of the three projections of an expert in it."""

    block: str
    gate: str
    up: str
    down: str


class SparseMlp:
    """renormalise: as for `ops.route`."""

    def __init__(
        self,
        info: ModelInfo,
        layer: int,
        weights: Weights,
        linear: LinearOptions,
        names: ExpertNames,
        mixture: Mixture,
        *,
        renormalise: bool,
    ) -> None:
        prefix, hidden, shard = f"model.layers.{layer}", info.hidden_size, linear.ranks.shard
        inner, rest = divmod(mixture.inner, shard.size)
        if rest:
            raise ModelError(
                f"Experts of {mixture.inner} numbers cannot be divided among {shard.size} ranks.",
                "Choose a tensor-parallel size that divides it.",
            )
        norm = weights.take(f"{prefix}.post_attention_layernorm.weight", hidden)
        self.norm = RmsNorm(norm, info.rms_norm_eps)
        block = f"{prefix}.{names.block}"
        rows, columns = (shard.part(axis, inner) for axis in (0, 1))

        def gate_up(expert: int) -> Tensor:
            matrices = (f"{block}.experts.{expert}.{name}.weight" for name in (names.gate, names.up))
            return torch.cat([weights.take(name, inner, hidden, part=rows) for name in matrices])

        def down(expert: int) -> Tensor:
            return weights.take(f"{block}.experts.{expert}.{names.down}.weight", hidden, inner, part=columns)

        router_ED = weights.take(f"{block}.gate.weight", mixture.experts, hidden)
        options = RouterOptions(mixture.experts, mixture.choices, renormalise)
        every = range(mixture.experts)
        self.experts = Experts(router_ED, map(gate_up, every), map(down, every), options, linear)

    def __call__(self, x_TD: Tensor | None, residual_TD: Tensor) -> Tensor | None:
        return self.experts.add_to(self.norm(x_TD, residual_TD), residual_TD)
