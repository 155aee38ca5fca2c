"""The only door to kernels: one typed function per operation; which implementation runs is decided here.

Callers hold tensors and shapes, never kernels. Batch-invariant forms are used where the caller asks for them
(`Linear.invariant`), so that a row's value does not depend on how many rows came with it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .kv_cache.reference import copy_blocks, store_kv
from .linear.reference import linear_row_tiles
from .paged_attention.metadata import AttentionMetadata
from .paged_attention.reference import paged_attention_tiles
from .rms_norm.reference import add_rms_norm, rms_norm
from .rotary.reference import rotary
from .sampling.reference import apply_penalties, filter_logits, gumbel_noise
from .sampling.seeds import child_seed
from .silu_mul.reference import silu_mul

__all__ = [
    "AttentionMetadata",
    "add_rms_norm",
    "apply_penalties",
    "child_seed",
    "copy_blocks",
    "filter_logits",
    "gumbel_noise",
    "linear",
    "paged_attention",
    "rms_norm",
    "rotary",
    "silu_mul",
    "store_kv",
]


def linear(x_TK: Tensor, w_NK: Tensor, bias_N: Tensor | None = None, *, invariant: bool = True) -> Tensor:
    """x_TK [tokens, in] · w_NK [out, in]ᵀ (+ bias) → [tokens, out]."""
    if invariant:
        return linear_row_tiles(x_TK, w_NK, bias_N)
    return torch.nn.functional.linear(x_TK, w_NK, bias_N)


def paged_attention(q_THD: Tensor, kv: Tensor, layer: int, meta: AttentionMetadata, scale: float) -> Tensor:
    """Causal attention of this step's tokens over the paged cache → [tokens, heads, head_dim]."""
    return paged_attention_tiles(q_THD, kv, layer, meta, scale)
