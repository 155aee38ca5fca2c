"""The projections and norms of a layer, from the names that all families give them."""

from __future__ import annotations

import torch

from ..assets.checkpoint import ModelInfo
from ..assets.errors import ModelError
from ..layers.linear import Linear, LinearOptions
from ..layers.norm import HeadNorms
from .weights import Weights


def qkv_projection(info: ModelInfo, prefix: str, weights: Weights, options: LinearOptions) -> Linear:
    """Queries, keys and values as one product, with biases where the checkpoint has them."""
    widths = {"q": info.heads * info.head_dim, "k": info.kv_heads * info.head_dim}
    widths["v"] = widths["k"]
    matrices = [
        weights.take(f"{prefix}.{name}_proj.weight", width, info.hidden_size)
        for name, width in widths.items()
    ]
    biases = [
        weights.take(f"{prefix}.{name}_proj.bias", width)
        for name, width in widths.items()
        if weights.has(f"{prefix}.{name}_proj.bias")
    ]
    return Linear(matrices, biases, options)


def out_projection(info: ModelInfo, prefix: str, weights: Weights, options: LinearOptions) -> Linear:
    """From the heads side by side back to the hidden size."""
    matrix = weights.take(f"{prefix}.o_proj.weight", info.hidden_size, info.heads * info.head_dim)
    bias = f"{prefix}.o_proj.bias"
    return Linear([matrix], [weights.take(bias, info.hidden_size)] if weights.has(bias) else [], options)


def gate_up_projection(info: ModelInfo, prefix: str, weights: Weights, options: LinearOptions) -> Linear:
    """Gate and up of a gated MLP as one product."""
    shape = info.intermediate_size, info.hidden_size
    return Linear(
        [weights.take(f"{prefix}.{name}_proj.weight", *shape) for name in ("gate", "up")], [], options
    )


def down_projection(info: ModelInfo, prefix: str, weights: Weights, options: LinearOptions) -> Linear:
    """From the MLP back to the hidden size."""
    return Linear(
        [weights.take(f"{prefix}.down_proj.weight", info.hidden_size, info.intermediate_size)], [], options
    )


def head_norms(info: ModelInfo, prefix: str, weights: Weights, offset: float = 0.0) -> HeadNorms:
    """One norm for all query heads, another for all key heads."""
    q_D, k_D = (weights.take(f"{prefix}.{name}_norm.weight", info.head_dim) for name in ("q", "k"))
    return HeadNorms(torch.stack([q_D] * info.heads + [k_D] * info.kv_heads), info.rms_norm_eps, offset)


def require_gate(info: ModelInfo, activation: str) -> None:
    """Raise ModelError where the MLPs are gated by something else."""
    found = info.raw.get("hidden_act", activation)
    if found != activation:
        raise ModelError(
            f"config.json has hidden_act = {found}; {info.architecture} is served with {activation}.",
            "Serve a checkpoint of the family as it was published.",
        )
