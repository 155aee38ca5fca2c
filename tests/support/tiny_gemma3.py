"""A tiny random Gemma 3, made and saved by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

VOCAB, WINDOW, PATTERN = 96, 24, 3


def write_tiny_gemma3(folder: Path, *, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Path:
    """Six layers, each third one full, the others with a window of 24; changes: of the configuration."""
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "query_pre_attn_scalar": 40,
        "sliding_window": WINDOW,
        "sliding_window_pattern": PATTERN,
        "max_position_embeddings": 512,
    }
    torch.manual_seed(0)
    model = Gemma3ForCausalLM(Gemma3TextConfig(**{**settings, **changes}))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # norms begin as ones, other weights so small that all tokens would look alike
            weight.normal_(std=0.3 if name.endswith("norm.weight") else 0.2)
    model.to(dtype).save_pretrained(folder)
    return folder
