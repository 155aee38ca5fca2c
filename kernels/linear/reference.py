"""Linear layers: y = x·Wᵀ (+ b). Plain fp32 reference, and the tiled form whose rows don't see each other.

Shapes: x_TK [tokens, in], w_NK [out, in], y_TN [tokens, out].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ROW_TILE = 16


def linear_reference(x_TK: Tensor, w_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Accumulated in fp32, rounded once to x's dtype."""
    y_TN = x_TK.float() @ w_NK.float().T
    if bias_N is not None:
        y_TN = y_TN + bias_N.float()
    return y_TN.to(x_TK.dtype)


def quantize_int8(w_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric rounding with one scale per output: int8 [out, in] and fp32 [out], w ≈ q · scale."""
    w_NK = w_NK.float()
    scale_N = (w_NK.abs().amax(dim=1) / 127).clamp(min=1e-12)
    return (w_NK / scale_N[:, None]).round().clamp(-127, 127).to(torch.int8), scale_N


def linear_row_tiles(x_TK: Tensor, w_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """`F.linear` in calls of exactly ROW_TILE rows, so that a row's value depends on nothing but the row.

    Math libraries choose their kernel, and with it the order of summation, by the number of rows. Padding
    every call to one number takes the choice away; rows of one product are independent of each other.
    """
    T, K = x_TK.shape
    if T == 0:
        return x_TK.new_empty(0, w_NK.shape[0])
    padded = -T % ROW_TILE
    if padded:
        x_TK = torch.cat((x_TK, x_TK.new_zeros(padded, K)))
    tiles = [F.linear(tile, w_NK, bias_N) for tile in torch.split(x_TK, ROW_TILE)]
    return (tiles[0] if len(tiles) == 1 else torch.cat(tiles))[:T]
