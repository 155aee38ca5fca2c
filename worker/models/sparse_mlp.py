"""The MLP of a mixture of experts, from the names that a family gives its weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..assets.checkpoint import ModelInfo
from ..assets.errors import ModelError
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
    """inner: width of an expert, as much as this rank has of it."""

    def __init__(
        self,
        info: ModelInfo,
        layer: int,
        weights: Weights,
        linear: LinearOptions,
        names: ExpertNames,
        inner: int,
        renormalise: bool,
    ) -> None:
        prefix, hidden = f"model.layers.{layer}", info.hidden_size
        self.norm = RmsNorm(
            weights.take(f"{prefix}.post_attention_layernorm.weight", hidden), info.rms_norm_eps
        )
        router = _router(info, renormalise)
        block = f"{prefix}.{names.block}"
        rows, columns = (linear.ranks.shard.part(axis, inner) for axis in (0, 1))
        gate_up = (
            torch.cat(
                [
                    weights.take(f"{block}.experts.{e}.{name}.weight", inner, hidden, part=rows)
                    for name in (names.gate, names.up)
                ]
            )
            for e in range(router.experts)
        )
        down = (
            weights.take(f"{block}.experts.{e}.{names.down}.weight", hidden, inner, part=columns)
            for e in range(router.experts)
        )
        gate_ED = weights.take(f"{block}.gate.weight", router.experts, hidden)
        self.experts = Experts(gate_ED, gate_up, down, router, linear)

    def __call__(self, x_TD: Tensor | None, residual_TD: Tensor) -> Tensor | None:
        return self.experts.add_to(self.norm(x_TD, residual_TD), residual_TD)


def number_of(info: ModelInfo, *keys: str) -> int:
    """The first of these keys that config.json has. Raises ModelError for anything but a positive integer."""
    value = next((info.raw[key] for key in keys if info.raw.get(key) is not None), None)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(
            f"config.json: {keys[0]} must be a positive integer, not {value!r}.", "Fetch this file again."
        )
    return value


def _router(info: ModelInfo, renormalise: bool) -> RouterOptions:
    experts = number_of(info, "num_experts", "num_local_experts")
    choices = number_of(info, "num_experts_per_tok")
    if choices > experts:
        raise ModelError(
            f"config.json lets a token meet {choices} of {experts} experts.", "Fetch this file again."
        )
    return RouterOptions(experts, choices, renormalise)
