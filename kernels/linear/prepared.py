"""A linear layer's weights in the form that its kernel wants, chosen once at load.

`Prepared` is opaque to callers. Native: packed for `cpu.cpp`; tiled: as they are, in calls of a fixed number
of rows; plain: as they are.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from ..cpu.arena import weights_arena
from ..cpu.library import library
from .reference import linear_row_tiles


@dataclass(frozen=True)
class Prepared:
    """weight: [out, in], or int32 [ceil(out/16), ceil(in/2), 16] where `native` is set."""

    weight: Tensor
    bias: Tensor | None
    out_features: int
    in_features: int
    native: ctypes.CDLL | None
    invariant: bool


def prepare_linear(w_NK: Tensor, bias_N: Tensor | None, *, invariant: bool, native: bool = True) -> Prepared:
    """native=False keeps to torch, for comparison."""
    N, K = w_NK.shape
    kernels = library() if native and w_NK.device.type == "cpu" and w_NK.dtype == torch.bfloat16 else None
    if kernels is None:
        return Prepared(w_NK, bias_N, N, K, None, invariant)
    packed = weights_arena.empty(((N + 15) // 16, (K + 1) // 2, 16), torch.int32)
    kernels.df_pack_linear(w_NK.contiguous().data_ptr(), N, K, packed.data_ptr())
    return Prepared(packed, bias_N, N, K, kernels, invariant)


def apply_linear(x_TK: Tensor, prepared: Prepared, out_dtype: torch.dtype | None = None) -> Tensor:
    """x_TK [tokens, in] → [tokens, out] in `out_dtype` (x's own, or fp32)."""
    if prepared.native is not None:
        return _native(x_TK, prepared, out_dtype or x_TK.dtype)
    linear = linear_row_tiles if prepared.invariant else torch.nn.functional.linear
    y_TN = linear(x_TK, prepared.weight, prepared.bias)
    return y_TN if out_dtype is None else y_TN.to(out_dtype)


def _native(x_TK: Tensor, prepared: Prepared, out_dtype: torch.dtype) -> Tensor:
    assert prepared.native is not None
    x_TK = x_TK.contiguous()
    y_TN = torch.empty((x_TK.shape[0], prepared.out_features), dtype=out_dtype)
    prepared.native.df_linear(
        x_TK.data_ptr(),
        prepared.weight.data_ptr(),
        None if prepared.bias is None else prepared.bias.data_ptr(),
        y_TN.data_ptr(),
        x_TK.shape[0],
        prepared.out_features,
        prepared.in_features,
        out_dtype == torch.float32,
    )
    return y_TN
