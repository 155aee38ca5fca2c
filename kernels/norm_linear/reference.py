"""Root-mean-square norm, projection and gate as one: y = act(n·Gᵀ)∘(n·Uᵀ), or n·Wᵀ (+ b).

n = norm(h)∘(w + offset), see `../rms_norm/reference.py`. Shapes: h_TK [tokens, in] fp32 (the residual
stream), norm_K [in], w_NK [out, in], or [2·out, in] with an activation: the gate's rows, then those of up.
All in fp32, rounded once, to norm_K's dtype.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..rms_norm.reference import rms_norm


def norm_linear(
    h_TK: Tensor,
    norm_K: Tensor,
    eps: float,
    w_NK: Tensor,
    scale_N: Tensor | None = None,
    bias_N: Tensor | None = None,
    activation: str | None = None,
    offset: float = 0.0,
) -> Tensor:
    """activation: None, silu or gelu_tanh; scale_N: fp32, of int8 weights' rows."""
    w = w_NK.float() if scale_N is None else w_NK.float() * scale_N[:, None]
    y = rms_norm(h_TK.float(), norm_K.float(), eps, offset) @ w.T
    if bias_N is not None:
        y = y + bias_N.float()
    if activation is not None:
        gate, up = y.chunk(2, dim=-1)
        y = up * (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh"))
    return y.to(norm_K.dtype)


def linear_add_(
    x_TK: Tensor, w_NK: Tensor, scale_N: Tensor | None, bias_N: Tensor | None, h_TN: Tensor
) -> None:
    """h (fp32) += x·Wᵀ·s (+ b), in place."""
    w = w_NK.float() if scale_N is None else w_NK.float() * scale_N[:, None]
    h_TN += F.linear(x_TK.float(), w, None if bias_N is None else bias_N.float())
