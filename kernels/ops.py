"""The only door to kernels: one typed function per operation; which implementation runs is decided here.

Callers hold tensors and shapes, never kernels. On CPU in bf16 the C++ kernels run where they could be
compiled, torch otherwise. Both keep a row's value independent of how many rows came with it.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from .cpu.library import library, status
from .kv_cache.reference import copy_blocks, store_kv
from .linear.prepared import Prepared, Quantization, prepare_linear
from .linear.prepared import apply_linear as linear
from .paged_attention import cpu as attention_cpu
from .paged_attention.metadata import AttentionMetadata
from .paged_attention.reference import paged_attention_tiles
from .rms_norm import reference as rms_reference
from .rms_norm.reference import rms_norm
from .rotary import reference as rotary_reference
from .rotary.reference import rotary
from .sampling import cpu as sampling_cpu
from .sampling.reference import apply_penalties, filter_logits, gumbel_noise, sample_reference
from .sampling.seeds import child_seed
from .silu_mul import reference as silu_reference

__all__ = [
    "AttentionMetadata",
    "Prepared",
    "Quantization",
    "add_rms_norm_",
    "apply_penalties",
    "child_seed",
    "copy_blocks",
    "cpu_status",
    "filter_logits",
    "gumbel_noise",
    "linear",
    "paged_attention",
    "prepare_linear",
    "rms_norm",
    "rotary",
    "rotary_store",
    "sample",
    "set_cpu_threads",
    "silu_mul",
    "store_kv",
]

LANES = 16


def cpu_status() -> str:
    """Which implementation a CPU runs, and why."""
    return status()


def set_cpu_threads(threads: int) -> None:
    """Threads of torch and of the native kernels."""
    torch.set_num_threads(threads)
    kernels = library()
    if kernels is not None:
        kernels.df_set_threads(threads)


def add_rms_norm_(x_TD: Tensor, residual_TD: Tensor, w_D: Tensor, eps: float) -> Tensor:
    """residual (fp32) += x, in place; returns norm(residual)·w [tokens, hidden] in x's dtype."""
    kernels = _native(x_TD, x_TD.shape[1])
    if kernels is None:
        return rms_reference.add_rms_norm_(x_TD, residual_TD, w_D, eps)
    out_TD = torch.empty_like(x_TD)
    kernels.df_add_rms_norm(
        x_TD.data_ptr(), residual_TD.data_ptr(), w_D.data_ptr(), out_TD.data_ptr(), *x_TD.shape, eps
    )
    return out_TD


def rotary_store(
    qkv_THD: Tensor, cos_sin_PR: Tensor, meta: AttentionMetadata, kv: Tensor, layer: int
) -> Tensor:
    """Rotates queries and keys, writes keys and values to their slots → q [tokens, heads, head_dim].

    qkv_THD [tokens, heads + 2·kv_heads, head_dim] may be overwritten; the result may be a view of it.
    """
    kernels = _native(qkv_THD, LANES) if kv.dtype == qkv_THD.dtype else None
    if kernels is None:
        return rotary_reference.rotary_store(qkv_THD, cos_sin_PR, meta.positions_T, meta.slots_T, kv, layer)
    T, all_heads, D = qkv_THD.shape
    _, layers, _, kv_heads, block_size, _ = kv.shape
    heads = all_heads - 2 * kv_heads
    kernels.df_rotary_store(
        qkv_THD.data_ptr(),
        cos_sin_PR.data_ptr(),
        meta.positions_T.data_ptr(),
        meta.slots_T.data_ptr(),
        kv.data_ptr(),
        *(T, heads, kv_heads, D, cos_sin_PR.shape[1], layer, layers, block_size),
    )
    return qkv_THD[:, :heads]


def silu_mul(gate_up_TI: Tensor) -> Tensor:
    """silu(gate)·up: [tokens, 2·intermediate] → [tokens, intermediate]."""
    T, width = gate_up_TI.shape
    kernels = _native(gate_up_TI, width // 2)
    if kernels is None:
        return silu_reference.silu_mul(gate_up_TI)
    out_TI = gate_up_TI.new_empty(T, width // 2)
    kernels.df_silu_mul(gate_up_TI.data_ptr(), out_TI.data_ptr(), T, width // 2)
    return out_TI


def paged_attention(q_THD: Tensor, kv: Tensor, layer: int, meta: AttentionMetadata, scale: float) -> Tensor:
    """Causal attention of this step's tokens over the paged cache → [tokens, heads, head_dim]."""
    kernels = library() if attention_cpu.supports(q_THD, kv) else None
    if kernels is None:
        return paged_attention_tiles(q_THD, kv, layer, meta, scale)
    return attention_cpu.paged_attention_cpu(kernels, q_THD, kv, layer, meta, scale)


def sample(
    logits_RV: Tensor,
    temperature_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    min_p_R: Tensor,
    seed_R: Tensor,
    position_R: Tensor,
) -> Tensor:
    """One token per row of logits (fp32 [rows, vocabulary]) → int64 [rows], by each row's own parameters.

    temperature (0 is greedy), top_p, min_p: fp32; top_k (0 is off), seed (64 bits, as signed) and position:
    int64; all contiguous. The noise is a function of (seed, position, token).
    """
    kernels = library() if sampling_cpu.supports(logits_RV) else None
    rows = (temperature_R, top_k_R, top_p_R, min_p_R, seed_R, position_R)
    if kernels is None:
        return sample_reference(logits_RV, *rows)
    return sampling_cpu.sample_cpu(kernels, logits_RV, *rows)


def _native(x: Tensor, width: int) -> ctypes.CDLL | None:
    """The kernels, if they take this tensor: contiguous bf16 on CPU, rows of whole vectors."""
    if x.device.type != "cpu" or x.dtype != torch.bfloat16 or width % LANES or not x.is_contiguous():
        return None
    return library()
