"""Llama, Mistral, Qwen 2: pre-norm decoder, grouped queries, rotary positions, SiLU gate; biases and windows
where the checkpoint has them.

Reads the cache of earlier tokens and writes that of this step's; knows nothing of sequences or sampling.
Shape suffixes: T tokens, D hidden, H heads, R rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from decodefleet.kernels import ops
from decodefleet.kernels.ops import AttentionOptions, KvCache

from ..assets.checkpoint import ModelInfo
from ..kv.groups import KvGroups
from ..layers.linear import LinearOptions
from ..layers.norm import HeadNorms, RmsNorm
from ..layers.rotary import Angles, make_rope
from .model import Metas
from .projections import (
    down_projection,
    embedding,
    gate_up_projection,
    head,
    out_projection,
    qkv_projection,
    require_gate,
)
from .weights import Weights


class LlamaAttention:
    """head_norms: of queries and keys, where the family has them."""

    head_norms: HeadNorms | None = None

    def __init__(
        self, info: ModelInfo, layer: int, groups: KvGroups, weights: Weights, linear: LinearOptions
    ) -> None:
        self.group, self.place = groups.places[layer]
        rule = groups.rule_of(layer)
        self.options = AttentionOptions(rule.window, rule.sinks, invariant=linear.invariant)
        self.heads, self.kv_heads, self.head_dim = info.heads, info.kv_heads, info.head_dim
        norm = weights.take(f"model.layers.{layer}.input_layernorm.weight", info.hidden_size)
        self.norm = RmsNorm(norm, info.rms_norm_eps)
        prefix = f"model.layers.{layer}.self_attn"
        self.qkv = qkv_projection(info, prefix, weights, linear)
        self.out = out_projection(info, prefix, weights, linear)

    def __call__(
        self,
        x_TD: Tensor | None,
        residual_TD: Tensor,
        angles: Angles,
        kv: KvCache,
        metas: Metas,
    ) -> Tensor | None:
        T, meta = residual_TD.shape[0], metas[self.group]
        qkv_TN = self.qkv.of_norm(x_TD, residual_TD, self.norm)
        qkv_THD = qkv_TN.view(T, self.heads + 2 * self.kv_heads, self.head_dim)
        if self.head_norms is not None:
            self.head_norms(qkv_THD)
        q_THD, q_sink_THD = angles.turn(qkv_THD, meta.slots_T, kv, self.place, sinks=self.options.sinks > 0)
        o_THD = ops.paged_attention(
            q_THD, kv, self.place, meta, self.head_dim**-0.5, self.options, q_sink_THD
        )
        return self.out.add_to(o_THD.reshape(T, -1), residual_TD)


class LlamaMlp:
    def __init__(self, info: ModelInfo, layer: int, weights: Weights, linear: LinearOptions) -> None:
        norm = weights.take(f"model.layers.{layer}.post_attention_layernorm.weight", info.hidden_size)
        self.norm = RmsNorm(norm, info.rms_norm_eps)
        prefix = f"model.layers.{layer}.mlp"
        self.gate_up = gate_up_projection(info, prefix, weights, linear)
        self.down = down_projection(info, prefix, weights, linear)

    def __call__(self, x_TD: Tensor | None, residual_TD: Tensor) -> Tensor | None:
        return self.down.add_to(self.gate_up.of_norm(x_TD, residual_TD, self.norm, "silu"), residual_TD)


class Mlp(Protocol):
    def __call__(self, x_TD: Tensor | None, residual_TD: Tensor) -> Tensor | None:
        """As a layer does."""


@dataclass(frozen=True)
class LlamaLayer:
    """Both halves hand on what is still to be added to the residual stream, None where nothing is."""

    attention: LlamaAttention
    mlp: Mlp

    def __call__(
        self,
        x_TD: Tensor | None,
        residual_TD: Tensor,
        angles: Angles,
        kv: KvCache,
        metas: Metas,
    ) -> Tensor | None:
        return self.mlp(self.attention(x_TD, residual_TD, angles, kv, metas), residual_TD)


class LlamaModel:
    """Token ids in, logits out. attention, make_mlp: what families of this shape differ in."""

    attention: type[LlamaAttention] = LlamaAttention

    def __init__(
        self,
        info: ModelInfo,
        groups: KvGroups,
        weights: Weights,
        max_positions: int | None,
        device: torch.device,
        linear: LinearOptions,
    ) -> None:
        require_gate(info, "silu")
        self.embedding = embedding(info, weights, linear)
        self.layers = [self._layer(info, i, groups, weights, linear) for i in range(info.layers)]
        self.norm = RmsNorm(weights.take("model.norm.weight", info.hidden_size), info.rms_norm_eps)
        self.head = head(info, weights, linear, self.embedding)
        self.rope = make_rope(info.rope, info.head_dim, max_positions, groups.sink_span, device)

    def make_mlp(self, info: ModelInfo, layer: int, weights: Weights, linear: LinearOptions) -> Mlp:
        return LlamaMlp(info, layer, weights, linear)

    def _layer(
        self, info: ModelInfo, layer: int, groups: KvGroups, weights: Weights, linear: LinearOptions
    ) -> LlamaLayer:
        attention = self.attention(info, layer, groups, weights, linear)
        return LlamaLayer(attention, self.make_mlp(info, layer, weights, linear))

    def forward(self, tokens_T: Tensor, positions_T: Tensor, kv: KvCache, metas: Metas) -> Tensor:
        """Final hidden states [T, D], normed; the step's keys and values are in `kv` afterwards.

        metas: of each KV group.
        """
        angles = self.rope.angles(positions_T)
        x_TD: Tensor | None = None
        # in fp32: sixty bf16 roundings of one sum cost more accuracy than all products together
        residual_TD = self.embedding(tokens_T)
        for layer in self.layers:
            x_TD = layer(x_TD, residual_TD, angles, kv, metas)
        return self.norm(x_TD, residual_TD)

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """fp32 [R, V]."""
        return self.head(hidden_RD)
