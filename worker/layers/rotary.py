"""Tables of rotary angles, with the scalings that published checkpoints use. No computation on the fly."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..assets.checkpoint import ModelInfo
from ..assets.errors import ModelError


class Angles(NamedTuple):
    """Of a step. cos_sin_PR: fp32 [rows, head_dim], cosines, then sines; rows_T: each token's row."""

    cos_sin_PR: Tensor
    rows_T: Tensor


def rope_table(info: ModelInfo, positions: int, device: torch.device) -> Tensor:
    """fp32 [positions, head_dim]: cosines, then sines, of position · inverse frequency."""
    inverse = _inverse_frequencies(info)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)


def _inverse_frequencies(info: ModelInfo) -> Tensor:
    exponents = torch.arange(0, info.head_dim, 2, dtype=torch.float32) / info.head_dim
    inverse = torch.pow(info.rope_theta, exponents).reciprocal()
    scaling = info.rope_scaling or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return inverse
    if kind == "linear":
        return inverse / float(scaling["factor"])
    if kind == "llama3":
        return _llama3(inverse, scaling)
    raise ModelError(
        f"config.json asks for rotary scaling of type {kind!r}, which is not supported.",
        "Serve a model with default, linear or llama3 rotary embeddings.",
    )


def _llama3(inverse: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""
    factor, trained = float(scaling["factor"]), float(scaling["original_max_position_embeddings"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    wavelength = 2 * math.pi / inverse
    blend = ((trained / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * inverse / factor + blend * inverse
