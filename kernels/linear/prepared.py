"""A linear layer's weights in the form that its kernel wants, chosen once at load.

`Prepared` is opaque to callers. Native: packed for `cpu.cpp`; otherwise as they are, used in calls of a fixed
number of rows where rows must not see each other. Weights may be rounded to int8 with a scale per output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..cpu.arena import weights_arena
from ..cpu.native import Kernels, library
from .reference import linear_row_tiles, quantize_int8

Quantization = Literal["none", "int8"]


@dataclass(frozen=True)
class Prepared:
    """weight: [out, in] in the model's dtype or int8, or packed in panels where `native` is set.

    scale: fp32 [out] with int8 weights. bias: [out] or None.
    """

    weight: Tensor
    scale: Tensor | None
    bias: Tensor | None
    out_features: int
    in_features: int
    native: Kernels | None
    invariant: bool


def prepare_linear(
    w_NK: Tensor,
    bias_N: Tensor | None,
    *,
    invariant: bool,
    quantization: Quantization = "none",
    native: bool = True,
) -> Prepared:
    """native=False keeps to torch, for comparison."""
    kernels = library() if native and w_NK.device.type == "cpu" and w_NK.dtype == torch.bfloat16 else None
    N, K = w_NK.shape
    scale_N = None
    if quantization == "int8":
        w_NK, scale_N = quantize_int8(w_NK)
    if kernels is not None:
        w_NK = _pack(kernels, w_NK.contiguous())
    return Prepared(w_NK, scale_N, bias_N, N, K, kernels, invariant)


def apply_linear(x_TK: Tensor, prepared: Prepared, out_dtype: torch.dtype | None = None) -> Tensor:
    """x_TK [tokens, in] → [tokens, out] in `out_dtype` (x's own, or fp32)."""
    if prepared.native is not None:
        return _native(prepared.native, x_TK.contiguous(), prepared, out_dtype or x_TK.dtype)
    weight, scale, bias = prepared.weight, prepared.scale, prepared.bias
    linear = linear_row_tiles if prepared.invariant else torch.nn.functional.linear
    if scale is None:
        y_TN = linear(x_TK, weight, bias)
    else:
        y_TN = (linear(x_TK, weight.to(x_TK.dtype), None) * scale).to(x_TK.dtype)
        y_TN = y_TN if bias is None else y_TN + bias
    return y_TN if out_dtype is None else y_TN.to(out_dtype)


def packed_shape(N: int, K: int) -> tuple[int, ...]:
    """Panels of 16 outputs, with inputs in pairs: see `panels.h`."""
    return -(-N // 16), -(-K // 2), 2, 16


def pack_into(kernels: Kernels, w_NK: Tensor, packed: Tensor) -> None:
    """w_NK: contiguous, bf16 or int8. packed: contiguous, of `packed_shape`."""
    N, K = w_NK.shape
    pack = kernels.df_pack_linear_int8 if w_NK.dtype == torch.int8 else kernels.df_pack_linear
    pack(w_NK.data_ptr(), N, K, packed.data_ptr())


def _pack(kernels: Kernels, w_NK: Tensor) -> Tensor:
    packed = weights_arena.empty(packed_shape(*w_NK.shape), w_NK.dtype)
    pack_into(kernels, w_NK, packed)
    return packed


def _native(kernels: Kernels, x_TK: Tensor, prepared: Prepared, out_dtype: torch.dtype) -> Tensor:
    scale, bias = prepared.scale, prepared.bias
    y_TN = torch.empty((x_TK.shape[0], prepared.out_features), dtype=out_dtype)
    kernels.df_linear(
        x_TK.data_ptr(),
        prepared.weight.data_ptr(),
        None if scale is None else scale.data_ptr(),
        None if bias is None else bias.data_ptr(),
        y_TN.data_ptr(),
        x_TK.shape[0],
        prepared.out_features,
        prepared.in_features,
        out_dtype == torch.float32,
    )
    return y_TN
