"""Rotary angles, with the scalings that published checkpoints use: a table for models with a limit of length,
and for those without one the rows of a step's tokens, computed in the step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decodefleet.kernels import ops
from decodefleet.kernels.ops import KvCache

from ..assets.errors import ModelError
from ..assets.rope import Rope

RECORDED_ROWS = 4096


class Angles(NamedTuple):
    """Of a step. cos_sin_PR: fp32 [rows, head_dim], cosines, then sines; rows_T: each token's row.

    sink_rows_T: the rows of its queries against sinks; None without sinks.
    """

    cos_sin_PR: Tensor
    rows_T: Tensor
    sink_rows_T: Tensor | None = None

    def turn(
        self, qkv_THD: Tensor, slots_T: Tensor, kv: KvCache, layer: int, *, sinks: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Rotate queries and keys, and store keys and values → queries, and those against sinks if wanted."""
        cos_sin_PR, rows_T, sink_rows_T = self
        if not sinks or sink_rows_T is None:
            return ops.rotary_store(qkv_THD, cos_sin_PR, rows_T, slots_T, kv, layer), None
        return ops.rotary_store_sinks(qkv_THD, cos_sin_PR, rows_T, sink_rows_T, slots_T, kv, layer)


class RopeTable:
    """All positions below a limit."""

    def __init__(self, rope: Rope, head_dim: int, positions: int, device: torch.device) -> None:
        self._cos_sin_PR = rope_table(rope, head_dim, positions, device)

    def angles(self, positions_T: Tensor) -> Angles:
        return Angles(self._cos_sin_PR, positions_T)


class EndlessRope:
    """Any position. In fp64: at position 10⁶ fp32 would be off by a tenth of a radian.

    sink_span: sinks and window together. A token farther from the sinks than that meets them as if it stood
    right behind such a stretch, at a distance that the model was trained on (StreamingLLM, Xiao et al. 2023).
    """

    def __init__(self, rope: Rope, head_dim: int, sink_span: int | None, device: torch.device) -> None:
        self._inverse_R = _inverse_frequencies(rope, head_dim).double().to(device)
        self._sink_span = sink_span
        # of all steps that may be recorded, since a recording holds its address
        self._rows = torch.arange(RECORDED_ROWS, device=device)

    def angles(self, positions_T: Tensor) -> Angles:
        tokens = len(positions_T)
        cos_sin_PR = ops.angles(positions_T, self._inverse_R, self._sink_span)
        rows = self._rows
        if len(cos_sin_PR) > len(rows):
            rows = torch.arange(len(cos_sin_PR), device=positions_T.device)
        return Angles(
            cos_sin_PR, rows[:tokens], None if self._sink_span is None else rows[tokens : 2 * tokens]
        )


def make_rope(
    rope: Rope, head_dim: int, positions: int | None, sink_span: int | None, device: torch.device
) -> RopeTable | EndlessRope:
    """positions: the limit of length, None where there is none."""
    if positions is None:
        return EndlessRope(rope, head_dim, sink_span, device)
    return RopeTable(rope, head_dim, positions, device)


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
