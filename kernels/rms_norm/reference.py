"""Root-mean-square norm (Zhang & Sennrich 2019): y = x / sqrt(mean(x²) + eps) · (w + offset).

With or without the residual stream, before a projection or behind it. offset: 1 where checkpoints keep
weights as differences from one (Gemma), else 0; the sum is not rounded to w's dtype, which could not hold it.
Shapes: x_TD [tokens, hidden], w_D [hidden]. Computed in fp32, rounded once to x's dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x_TD: Tensor, w_D: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Normalises the last dimension, whatever the leading ones (per-head norms pass [T, H, D])."""
    return _normed(x_TD, w_D, eps, offset).to(x_TD.dtype)


def add_rms_norm_(x_TD: Tensor, residual_TD: Tensor, w_D: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """The residual stream (fp32) takes x, in place, and its norm goes on in x's dtype."""
    residual_TD += x_TD
    return rms_norm(residual_TD, w_D, eps, offset).to(x_TD.dtype)


def norm_add_(x_TD: Tensor, residual_TD: Tensor, w_D: Tensor, eps: float, offset: float = 0.0) -> None:
    """The residual stream (fp32) takes the norm of x, in place; nothing is rounded between."""
    residual_TD += _normed(x_TD, w_D, eps, offset)


def norm_heads_(x_THD: Tensor, w_HD: Tensor, eps: float, offset: float = 0.0) -> None:
    """The first heads of x, as many as w has rows, become their norms, in place; the rest stays."""
    normed_THD = x_THD[:, : w_HD.shape[0]]
    normed_THD.copy_(rms_norm(normed_THD, w_HD, eps, offset))


def _normed(x_TD: Tensor, w_D: Tensor, eps: float, offset: float) -> Tensor:
    x = x_TD.float()
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * scale * (w_D.float() + offset)
