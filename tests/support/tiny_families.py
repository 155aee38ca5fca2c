"""Tiny random checkpoints of the model families, made and saved by transformers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

VOCAB, WINDOW, LIMIT, TRAINED = 96, 24, 512, 64
SHAPE: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": LIMIT,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": TRAINED,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": TRAINED,
}


def longrope(pairs: int) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0 + 0.1 * i for i in range(pairs)],
        "long_factor": [1.0 + 2.0 * math.sqrt(i) for i in range(pairs)],
    }


# by a name for people
FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama3": lambda: LlamaConfig(**SHAPE, rope_parameters=LLAMA3),
    "mistral": lambda: MistralConfig(**SHAPE, sliding_window=WINDOW),
    "qwen2": lambda: Qwen2Config(**SHAPE, rope_parameters=YARN),
    "qwen2-window": lambda: Qwen2Config(
        **SHAPE, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "qwen3": lambda: Qwen3Config(**SHAPE, head_dim=48),
    # the first layer is dense
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **SHAPE,
        head_dim=32,
        moe_intermediate_size=48,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        mlp_only_layers=[0],
    ),
    "mixtral": lambda: MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
    "phi3": lambda: Phi3Config(
        **SHAPE, original_max_position_embeddings=TRAINED, rope_parameters=longrope(16)
    ),
    # of 32 numbers 24 turn, as in Phi-4-mini
    "phi3-partial": lambda: Phi3Config(
        **SHAPE,
        original_max_position_embeddings=TRAINED,
        rope_parameters={**longrope(12), "partial_rotary_factor": 0.75},
    ),
}


def write_family(folder: Path, family: str, *, dtype: torch.dtype = torch.bfloat16) -> Path:
    return write_random(folder, FAMILIES[family](), dtype)


def write_random(folder: Path, config: PreTrainedConfig, dtype: torch.dtype) -> Path:
    """A model with random weights for this configuration, in Hugging Face form."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # norms begin as ones, other weights so small that all tokens would look alike
            if name.endswith("norm.weight"):
                weight.normal_(mean=1.0, std=0.3)
            else:
                weight.normal_(std=0.2)
    model.to(dtype).save_pretrained(folder)
    return folder
