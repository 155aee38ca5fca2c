"""Binding of `cpu.cpp`: sampling on CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cpu.native import Kernels


def supports(logits_RV: Tensor) -> bool:
    return logits_RV.device.type == "cpu" and logits_RV.dtype == torch.float32 and logits_RV.is_contiguous()


def argmax_cpu(kernels: Kernels, logits_RV: Tensor) -> Tensor:
    tokens_R = torch.empty(logits_RV.shape[0], dtype=torch.int64)
    kernels.df_argmax(logits_RV.data_ptr(), *logits_RV.shape, tokens_R.data_ptr())
    return tokens_R


def sample_cpu(
    kernels: Kernels,
    logits_RV: Tensor,
    temperature_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    min_p_R: Tensor,
    seed_R: Tensor,
    position_R: Tensor,
) -> Tensor:
    """See `reference.sample_reference`."""
    R, V = logits_RV.shape
    tokens_R = torch.empty(R, dtype=torch.int64)
    rows = (temperature_R, top_k_R, top_p_R, min_p_R, seed_R, position_R, tokens_R)
    kernels.df_sample(logits_RV.data_ptr(), R, V, *(row.data_ptr() for row in rows))
    return tokens_R
