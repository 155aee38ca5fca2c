"""The projections around attention, from the names that all families give them."""

from __future__ import annotations

from ..assets.checkpoint import ModelInfo
from ..layers.linear import Linear, LinearOptions
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
