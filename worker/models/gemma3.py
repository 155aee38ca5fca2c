"""Gemma 3, text only: norms before and behind each half, norms of query and key heads, layers with a window
between layers without one, each kind with its own rotary base, gelu gate, scaled embeddings.

Reads the cache of earlier tokens and writes that of this step's; knows nothing of sequences or sampling.
Shape suffixes: T tokens, D hidden, H heads, P positions, R rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from decodefleet.kernels import ops
from decodefleet.kernels.ops import AttentionOptions, KvCache

from ..assets.checkpoint import ModelInfo
from ..assets.errors import ModelError
from ..kv.groups import KvGroups
from ..layers.linear import LinearOptions
from ..layers.norm import RmsNorm
from ..layers.rotary import Angles, make_rope
from .model import Metas
from .projections import (
    down_projection,
    embedding,
    gate_up_projection,
    head,
    head_norms,
    out_projection,
    qkv_projection,
)
from .weights import Weights

# checkpoints keep norm weights as differences from one
NORM_OFFSET = 1.0
# of Gemma 2 and of embedding models
_UNSUPPORTED = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")


class Gemma3Attention:
    def __init__(
        self, info: ModelInfo, layer: int, groups: KvGroups, weights: Weights, linear: LinearOptions
    ) -> None:
        self.group, self.place = groups.places[layer]
        rule = groups.rule_of(layer)
        self.options = AttentionOptions(rule.window, rule.sinks, invariant=linear.invariant)
        self.scale = float(info.raw["query_pre_attn_scalar"]) ** -0.5
        self.heads, self.kv_heads, self.head_dim = info.heads, info.kv_heads, info.head_dim
        prefix = f"model.layers.{layer}"
        self.norm = _norm(info, f"{prefix}.input_layernorm", weights)
        self.post_norm = _norm(info, f"{prefix}.post_attention_layernorm", weights)
        self.head_norms = head_norms(info, f"{prefix}.self_attn", weights, NORM_OFFSET)
        self.qkv = qkv_projection(info, f"{prefix}.self_attn", weights, linear)
        self.out = out_projection(info, f"{prefix}.self_attn", weights, linear)

    def __call__(self, residual_TD: Tensor, angles: Angles, kv: KvCache, metas: Metas) -> None:
        T, meta = residual_TD.shape[0], metas[self.group]
        qkv_TN = self.qkv.of_norm(None, residual_TD, self.norm)
        qkv_THD = qkv_TN.view(T, self.heads + 2 * self.kv_heads, self.head_dim)
        self.head_norms(qkv_THD)
        q_THD, q_sink_THD = angles.turn(qkv_THD, meta.slots_T, kv, self.place, sinks=self.options.sinks > 0)
        o_THD = ops.paged_attention(q_THD, kv, self.place, meta, self.scale, self.options, q_sink_THD)
        self.post_norm.add_to(self.out(o_THD.reshape(T, -1)), residual_TD)


class Gemma3Mlp:
    def __init__(self, info: ModelInfo, layer: int, weights: Weights, linear: LinearOptions) -> None:
        prefix = f"model.layers.{layer}"
        self.norm = _norm(info, f"{prefix}.pre_feedforward_layernorm", weights)
        self.post_norm = _norm(info, f"{prefix}.post_feedforward_layernorm", weights)
        self.gate_up = gate_up_projection(info, f"{prefix}.mlp", weights, linear)
        self.down = down_projection(info, f"{prefix}.mlp", weights, linear)

    def __call__(self, residual_TD: Tensor) -> None:
        x_TI = self.gate_up.of_norm(None, residual_TD, self.norm, "gelu_tanh")
        self.post_norm.add_to(self.down(x_TI), residual_TD)


class Gemma3Layer:
    """Both halves add to the residual stream, in place."""

    def __init__(
        self, info: ModelInfo, layer: int, groups: KvGroups, weights: Weights, linear: LinearOptions
    ) -> None:
        self.windowed = info.layer_windows[layer] is not None
        self.attention = Gemma3Attention(info, layer, groups, weights, linear)
        self.mlp = Gemma3Mlp(info, layer, weights, linear)

    def __call__(self, residual_TD: Tensor, angles: Angles, kv: KvCache, metas: Metas) -> None:
        self.attention(residual_TD, angles, kv, metas)
        self.mlp(residual_TD)


class Gemma3Model:
    """Token ids in, logits out."""

    def __init__(
        self,
        info: ModelInfo,
        groups: KvGroups,
        weights: Weights,
        max_positions: int | None,
        device: torch.device,
        linear: LinearOptions,
    ) -> None:
        _require_supported(info)
        # rounded, as it was in training: 25.25 for 640 hidden numbers in bf16
        scale = float(torch.tensor(math.sqrt(info.hidden_size), dtype=weights.dtype))
        self.embedding = embedding(info, weights, linear, scale)
        self.layers = [Gemma3Layer(info, i, groups, weights, linear) for i in range(info.layers)]
        self.norm = _norm(info, "model.norm", weights)
        self.head = head(info, weights, linear, self.embedding)
        self.rope, self.window_rope = (
            make_rope(rope, info.head_dim, max_positions, groups.sink_span, device)
            for rope in (info.rope, info.window_rope)
        )

    def forward(self, tokens_T: Tensor, positions_T: Tensor, kv: KvCache, metas: Metas) -> Tensor:
        """Final hidden states [T, D], normed; the step's keys and values are in `kv` afterwards."""
        full, windowed = self.rope.angles(positions_T), self.window_rope.angles(positions_T)
        residual_TD = self.embedding(tokens_T)
        for layer in self.layers:
            layer(residual_TD, windowed if layer.windowed else full, kv, metas)
        return self.norm(None, residual_TD)

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """fp32 [R, V]."""
        return self.head(hidden_RD)


def _norm(info: ModelInfo, name: str, weights: Weights) -> RmsNorm:
    return RmsNorm(weights.take(f"{name}.weight", info.hidden_size), info.rms_norm_eps, NORM_OFFSET)


def _require_supported(info: ModelInfo) -> None:
    for key in _UNSUPPORTED:
        if info.raw.get(key):
            raise ModelError(
                f"config.json has {key} = {info.raw[key]}, which is not supported.",
                "Serve a Gemma 3 text model without it.",
            )
