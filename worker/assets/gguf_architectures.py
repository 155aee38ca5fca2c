"""How each architecture's GGUF differs from its checkpoint: names, settings, order of rows. Data, no I/O."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

Settings = dict[str, Any]


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """One architecture.

    config: GGUF key (without the architecture's prefix) to config.json key.
    optional: those GGUF keys that have a default where they are absent.
    tensors: GGUF name to checkpoint name; {} stands for the layer.
    complete: from those settings of config.json, None for absent ones, to all that the GGUF implies.
    interleaved: GGUF names whose rows llama.cpp reorders for its rotary embedding, with the key of the
        number of heads.
    norm_offset: what llama.cpp's converter adds to the weights of norms.
    """

    hf_class: str
    model_type: str
    config: Mapping[str, str]
    optional: Collection[str]
    tensors: Mapping[str, str]
    complete: Callable[[Settings], Settings]
    interleaved: Mapping[str, str] = field(default_factory=dict)
    norm_offset: float = 0.0


_DECODER_SETTINGS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}

_DECODER_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "blk.{}.attn_norm.weight": "model.layers.{}.input_layernorm.weight",
    "blk.{}.attn_q.weight": "model.layers.{}.self_attn.q_proj.weight",
    "blk.{}.attn_k.weight": "model.layers.{}.self_attn.k_proj.weight",
    "blk.{}.attn_v.weight": "model.layers.{}.self_attn.v_proj.weight",
    "blk.{}.attn_output.weight": "model.layers.{}.self_attn.o_proj.weight",
    "blk.{}.ffn_gate.weight": "model.layers.{}.mlp.gate_proj.weight",
    "blk.{}.ffn_up.weight": "model.layers.{}.mlp.up_proj.weight",
    "blk.{}.ffn_down.weight": "model.layers.{}.mlp.down_proj.weight",
}


def _complete_llama(settings: Settings) -> Settings:
    return {**settings, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}


def _complete_phi3(settings: Settings) -> Settings:
    head_dim = settings["hidden_size"] // settings["num_attention_heads"]
    turning = settings["rope_dimensions"] or head_dim
    return {
        **{key: value for key, value in settings.items() if key != "rope_dimensions"},
        "partial_rotary_factor": turning / head_dim,
        # written as 0 where there is none
        "sliding_window": settings["sliding_window"] or None,
        "hidden_act": "silu",
    }


def _complete_gemma3(settings: Settings) -> Settings:
    """What llama.cpp knows of the family and does not write: scale of the scores, layers without window."""
    layers, pattern = settings["num_hidden_layers"], settings["sliding_window_pattern"] or 6
    slides = [(layer + 1) % pattern != 0 for layer in range(layers)]
    # the 27B alone scales by the hidden size's share of a head
    is_27b = layers == 62
    return {
        **{key: value for key, value in settings.items() if key != "sliding_window_pattern"},
        "layer_types": ["sliding_attention" if sliding else "full_attention" for sliding in slides],
        "rope_local_base_freq": settings["rope_local_base_freq"] or 10_000.0,
        "query_pre_attn_scalar": settings["hidden_size"] // settings["num_attention_heads"]
        if is_27b
        else settings["head_dim"],
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
    }


_LLAMA = GgufArchitecture(
    hf_class="LlamaForCausalLM",
    model_type="llama",
    config={**_DECODER_SETTINGS, "rope.dimension_count": "head_dim"},
    optional=("attention.head_count_kv", "rope.freq_base", "rope.dimension_count"),
    tensors={
        **_DECODER_TENSORS,
        "blk.{}.ffn_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    },
    complete=_complete_llama,
    interleaved={
        "blk.{}.attn_q.weight": "attention.head_count",
        "blk.{}.attn_k.weight": "attention.head_count_kv",
    },
)

_GEMMA3 = GgufArchitecture(
    hf_class="Gemma3ForCausalLM",
    model_type="gemma3_text",
    config={
        **_DECODER_SETTINGS,
        "attention.key_length": "head_dim",
        "attention.sliding_window": "sliding_window",
        "attention.sliding_window_pattern": "sliding_window_pattern",
        "rope.freq_base_swa": "rope_local_base_freq",
    },
    optional=("attention.sliding_window_pattern", "rope.freq_base_swa"),
    tensors={
        **_DECODER_TENSORS,
        "blk.{}.attn_q_norm.weight": "model.layers.{}.self_attn.q_norm.weight",
        "blk.{}.attn_k_norm.weight": "model.layers.{}.self_attn.k_norm.weight",
        "blk.{}.post_attention_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
        "blk.{}.ffn_norm.weight": "model.layers.{}.pre_feedforward_layernorm.weight",
        "blk.{}.post_ffw_norm.weight": "model.layers.{}.post_feedforward_layernorm.weight",
    },
    complete=_complete_gemma3,
    norm_offset=1.0,
)

_QWEN2 = GgufArchitecture(
    hf_class="Qwen2ForCausalLM",
    model_type="qwen2",
    config=_DECODER_SETTINGS,
    optional=("attention.head_count_kv", "rope.freq_base"),
    tensors={
        **_DECODER_TENSORS,
        "blk.{}.ffn_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
        "blk.{}.attn_q.bias": "model.layers.{}.self_attn.q_proj.bias",
        "blk.{}.attn_k.bias": "model.layers.{}.self_attn.k_proj.bias",
        "blk.{}.attn_v.bias": "model.layers.{}.self_attn.v_proj.bias",
    },
    complete=lambda settings: {**settings, "hidden_act": "silu", "use_sliding_window": False},
)

_QWEN3 = GgufArchitecture(
    hf_class="Qwen3ForCausalLM",
    model_type="qwen3",
    config={**_DECODER_SETTINGS, "attention.key_length": "head_dim"},
    optional=("attention.head_count_kv", "rope.freq_base"),
    tensors={
        **_DECODER_TENSORS,
        "blk.{}.ffn_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
        "blk.{}.attn_q_norm.weight": "model.layers.{}.self_attn.q_norm.weight",
        "blk.{}.attn_k_norm.weight": "model.layers.{}.self_attn.k_norm.weight",
    },
    complete=lambda settings: {**settings, "hidden_act": "silu", "use_sliding_window": False},
)

_PHI3 = GgufArchitecture(
    hf_class="Phi3ForCausalLM",
    model_type="phi3",
    config={
        **_DECODER_SETTINGS,
        "attention.sliding_window": "sliding_window",
        "rope.dimension_count": "rope_dimensions",
        "rope.scaling.original_context_length": "original_max_position_embeddings",
    },
    optional=(
        "attention.head_count_kv",
        "attention.sliding_window",
        "rope.freq_base",
        "rope.dimension_count",
        "rope.scaling.original_context_length",
    ),
    tensors={
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
        "blk.{}.attn_norm.weight": "model.layers.{}.input_layernorm.weight",
        "blk.{}.attn_qkv.weight": "model.layers.{}.self_attn.qkv_proj.weight",
        "blk.{}.attn_output.weight": "model.layers.{}.self_attn.o_proj.weight",
        "blk.{}.ffn_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
        "blk.{}.ffn_up.weight": "model.layers.{}.mlp.gate_up_proj.weight",
        "blk.{}.ffn_down.weight": "model.layers.{}.mlp.down_proj.weight",
    },
    complete=_complete_phi3,
)

ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    "gemma3": _GEMMA3,
    "llama": _LLAMA,
    "phi3": _PHI3,
    "qwen2": _QWEN2,
    "qwen3": _QWEN3,
}
