"""The projections of a layer and the two ends of a model, from the names that all families give them.

`info` is the model as this rank sees it: each takes the rank's part of the weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..assets.checkpoint import ModelInfo
from ..assets.errors import ModelError
from ..layers.linear import Linear, LinearOptions, summed_linear
from ..layers.norm import HeadNorms
from ..layers.vocabulary import Embedding, Head
from .weights import Weights


def qkv_projection(info: ModelInfo, prefix: str, weights: Weights, options: LinearOptions) -> Linear:
    """Queries, keys and values as one product, with biases where the checkpoint has them."""
    shard, q, kv = options.ranks.shard, info.heads * info.head_dim, info.kv_heads * info.head_dim
    widths = {"q": (q, shard.part(0, q)), "k": (kv, shard.kv_part(0, kv)), "v": (kv, shard.kv_part(0, kv))}
    matrices = [
        weights.take(f"{prefix}.{name}_proj.weight", width, info.hidden_size, part=part)
        for name, (width, part) in widths.items()
    ]
    biases = [
        weights.take(f"{prefix}.{name}_proj.bias", width, part=part)
        for name, (width, part) in widths.items()
        if weights.has(f"{prefix}.{name}_proj.bias")
    ]
    return Linear(matrices, biases, options)


def out_projection(info: ModelInfo, prefix: str, weights: Weights, options: LinearOptions) -> Linear:
    """From the heads side by side back to the hidden size."""
    width, bias = info.heads * info.head_dim, f"{prefix}.o_proj.bias"
    part = options.ranks.shard.part(1, width)
    matrix = weights.take(f"{prefix}.o_proj.weight", info.hidden_size, width, part=part)
    # added once to the sum of all ranks' products
    biased = options.ranks.shard.rank == 0 and weights.has(bias)
    return summed_linear([matrix], [weights.take(bias, info.hidden_size)] if biased else [], options)


def gate_up_projection(info: ModelInfo, prefix: str, weights: Weights, options: LinearOptions) -> Linear:
    """Gate and up of a gated MLP as one product."""
    shape, part = (
        (info.intermediate_size, info.hidden_size),
        options.ranks.shard.part(0, info.intermediate_size),
    )
    return Linear(
        [weights.take(f"{prefix}.{name}_proj.weight", *shape, part=part) for name in ("gate", "up")],
        [],
        options,
    )


def down_projection(info: ModelInfo, prefix: str, weights: Weights, options: LinearOptions) -> Linear:
    """From the MLP back to the hidden size."""
    shape, part = (
        (info.hidden_size, info.intermediate_size),
        options.ranks.shard.part(1, info.intermediate_size),
    )
    return summed_linear([weights.take(f"{prefix}.down_proj.weight", *shape, part=part)], [], options)


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


def embedding(info: ModelInfo, weights: Weights, options: LinearOptions, scale: float = 1.0) -> Embedding:
    table_VD = _table("model.embed_tokens.weight", info, weights, options)
    return Embedding(table_VD, info.vocab_size, options.ranks, scale)


def head(info: ModelInfo, weights: Weights, options: LinearOptions, embedding: Embedding) -> Head:
    """The embedding's own table where there is no other."""
    tied = info.tie_word_embeddings or not weights.has("lm_head.weight")
    table_VD = embedding.table_VD if tied else _table("lm_head.weight", info, weights, options)
    return Head(table_VD, info.vocab_size, options)


def _table(name: str, info: ModelInfo, weights: Weights, options: LinearOptions) -> Tensor:
    part = options.ranks.shard.vocabulary(info.vocab_size)
    rows = info.vocab_size if part is None else part.stop - part.start
    return weights.take(name, rows, info.hidden_size, part=part)
