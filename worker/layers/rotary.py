"""Rotary angles: a table for models with a limit of length, and for those without one the rows of a step's
tokens, computed in the step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from decodefleet.kernels import ops
from decodefleet.kernels.ops import KvCache

from ..assets.rope import Rope
from .frequencies import frequencies

RECORDED_ROWS = 4096


class Angles(NamedTuple):
    """Of a step. cos_sin_PR: fp32 [rows, numbers of a head that turn], cosines, then sines.

    rows_T: each token's row. sink_rows_T: the rows of its queries against sinks; None without sinks.
    """

    cos_sin_PR: Tensor
    rows_T: Tensor
    sink_rows_T: Tensor | None = None

    def turn(
        self, qkv_THD: Tensor, slots_T: Tensor, kv: KvCache, layer: int, *, sinks: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Rotate queries and keys, and store keys and values → queries, and those against sinks if wanted."""
        cos_sin_PR, rows_T, sink_rows_T = self
        sink_rows_T = sink_rows_T if sinks else None
        return ops.rotary_store(qkv_THD, cos_sin_PR, rows_T, slots_T, kv, layer, sink_rows_T)


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
        found = frequencies(rope, head_dim, None)
        self._inverse_R, self._scale = found.inverse_R.double().to(device), found.scale
        self._sink_span = sink_span
        # of all steps that may be recorded, since a recording holds its address
        self._rows = torch.arange(RECORDED_ROWS, device=device)

    def angles(self, positions_T: Tensor) -> Angles:
        tokens = len(positions_T)
        cos_sin_PR = ops.angles(positions_T, self._inverse_R, self._sink_span)
        if self._scale != 1:
            cos_sin_PR *= self._scale
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
    """fp32 [positions, numbers of a head that turn]: cosines, then sines, of position · inverse frequency."""
    found = frequencies(rope, head_dim, positions)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), found.inverse_R)
    return (torch.cat((angles.cos(), angles.sin()), dim=-1) * found.scale).to(device)
