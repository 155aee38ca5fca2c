"""Rotary position embedding (Su et al. 2021), half-split pairing as in Hugging Face checkpoints.

Dimension i < R/2 is paired with i + R/2, where R ≤ D is the rotated width; the rest passes through.
Shapes: x_THD [tokens, heads, head_dim], cos_sin_PR [positions, R] (cos first, then sin, R/2 each; fp32),
qkv_THD [tokens, heads + 2·kv_heads, head_dim].
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kv_cache.layout import KvCache
from ..kv_cache.reference import store_kv


def angles(positions_T: Tensor, inverse_R: Tensor, span: int | None = None) -> Tensor:
    """Rows of cos_sin_PR for any positions, in fp64; with a span those of min(position, span - 1) follow."""
    if span is not None:
        positions_T = torch.cat((positions_T, positions_T.clamp(max=span - 1)))
    angles_PR = torch.outer(positions_T.double(), inverse_R)
    return torch.cat((angles_PR.cos(), angles_PR.sin()), dim=-1).float()


def rotary(x_THD: Tensor, positions_T: Tensor, cos_sin_PR: Tensor) -> Tensor:
    """x rotated by its position; computed in fp32, rounded once."""
    R = cos_sin_PR.shape[1]
    cos, sin = cos_sin_PR[positions_T].unsqueeze(1).chunk(2, dim=-1)
    first, second = x_THD[..., :R].float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    rotated = rotated.to(x_THD.dtype)
    return rotated if x_THD.shape[-1] == R else torch.cat((rotated, x_THD[..., R:]), dim=-1)


def rotary_store(
    qkv_THD: Tensor,
    cos_sin_PR: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    kv: KvCache,
    layer: int,
    sink_rows_T: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Queries and keys rotated, keys and values written to their slots → q, and q turned by `sink_rows_T`."""
    heads = qkv_THD.shape[1] - 2 * kv.kv_heads
    q_THD, k_THD, v_THD = qkv_THD.split((heads, kv.kv_heads, kv.kv_heads), dim=1)
    store_kv(rotary(k_THD, positions_T, cos_sin_PR), v_THD, kv, layer, slots_T)
    q_sink_THD = None if sink_rows_T is None else rotary(q_THD, sink_rows_T, cos_sin_PR)
    return rotary(q_THD, positions_T, cos_sin_PR), q_sink_THD
