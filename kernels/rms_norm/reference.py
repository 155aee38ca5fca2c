"""Root-mean-square norm (Zhang & Sennrich 2019): y = x / sqrt(mean(x²) + eps) · w, with or without residual.

Shapes: x_TD [tokens, hidden], w_D [hidden]. Computed in fp32, rounded once to x's dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x_TD: Tensor, w_D: Tensor, eps: float) -> Tensor:
    """Normalises the last dimension, whatever the leading ones (per-head norms pass [T, H, D])."""
    x = x_TD.float()
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return (x * scale * w_D.float()).to(x_TD.dtype)


def add_rms_norm_(x_TD: Tensor, residual_TD: Tensor, w_D: Tensor, eps: float) -> Tensor:
    """The residual stream (fp32) takes x, in place, and its norm goes on in x's dtype."""
    residual_TD += x_TD
    return rms_norm(residual_TD, w_D, eps).to(x_TD.dtype)
