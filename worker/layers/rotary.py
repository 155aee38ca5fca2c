"""Tables of rotary angles, with the scalings that published checkpoints use. No computation on the fly."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..assets.errors import ModelError
from ..assets.rope import Rope


class Angles(NamedTuple):
    """Of a step. cos_sin_PR: fp32 [rows, head_dim], cosines, then sines; rows_T: each token's row."""

    cos_sin_PR: Tensor
    rows_T: Tensor


def rope_table(rope: Rope, head_dim: int, positions: int, device: torch.device) -> Tensor:
    """fp32 [positions, head_dim]: cosines, then sines, of position · inverse frequency."""
    inverse = _inverse_frequencies(rope, head_dim)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)


def _inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inverse = torch.pow(rope.theta, exponents).reciprocal()
    if rope.scaling is None:
        return inverse
    scaling, kind = rope.scaling, rope.scaling["rope_type"]
    if kind == "linear":
        return inverse / float(scaling["factor"])
    if kind == "llama3":
        return _llama3(inverse, scaling)
    raise ModelError(
        f"config.json asks for rotary scaling of type {kind!r}, which is not supported.",
        "Serve a model with default, linear or llama3 rotary embeddings.",
    )


def _llama3(inverse: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""
    factor, trained = float(scaling["factor"]), float(scaling["original_max_position_embeddings"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    wavelength = 2 * math.pi / inverse
    blend = ((trained / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * inverse / factor + blend * inverse
