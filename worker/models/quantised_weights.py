"""Quantised checkpoints, widened to the model's dtype one tensor after the other: number · scale.

Reads the forms of `assets.quantised`: fp8 numbers, int8 numbers, or integers packed into words of 32 bits,
with a scale per tensor, row, group of columns, or block. Knows nothing of architectures.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..assets.errors import ModelError
from ..assets.quantised import WeightFormat
from ..parallel.shard import Part
from .weights import CheckpointWeights, whole_shape

_WORD_BITS = 32
_SCALES = ("weight_scale", "weight_scale_inv")


class QuantisedWeights:
    """Weights as `weights` has them, those with scales widened."""

    def __init__(self, weights: CheckpointWeights, form: WeightFormat) -> None:
        self._weights, self._form = weights, form
        self.dtype, self.folder = weights.dtype, weights.folder

    @property
    def nbytes(self) -> int:
        return self._weights.nbytes

    def has(self, name: str) -> bool:
        return self._weights.has(name) or self._weights.has(f"{name}_packed")

    def take(self, name: str, *shape: int, part: Part | None = None) -> Tensor:
        module, _, kind = name.rpartition(".")
        scale = next((key for key in _SCALES if self._weights.has(f"{module}.{key}")), None)
        if kind != "weight" or scale is None:
            return self._weights.take(name, *shape, part=part)
        if self._weights.has(f"{module}.weight_zero_point"):
            raise ModelError(f"{name} has zero points, which cannot be read.", "Serve another checkpoint.")
        whole = whole_shape(shape, part)
        numbers_NK = self._numbers(name, whole, part)
        scales = self._weights.read(f"{module}.{scale}").float()
        factors_NK = self._spread(name, scales, whole, part)
        device = self._weights.device
        return (numbers_NK.to(device).float() * factors_NK.to(device)).to(self.dtype)

    def _numbers(self, name: str, whole: tuple[int, ...], part: Part | None) -> Tensor:
        if not self._weights.has(f"{name}_packed"):
            return self._weights.read(name, whole, part)
        words = -(-whole[1] * self._form.bits // _WORD_BITS)
        if part is None or part.axis == 0:
            rows = None if part is None else part
            packed = self._weights.read(f"{name}_packed", (whole[0], words), rows)
            return unpack(packed, self._form.bits, whole[1])
        packed = self._weights.read(f"{name}_packed", (whole[0], words))
        return unpack(packed, self._form.bits, whole[1])[:, part.start : part.stop]

    def _spread(self, name: str, scales: Tensor, whole: tuple[int, ...], part: Part | None) -> Tensor:
        """A factor for each number, or one that broadcasts over them."""
        if scales.numel() == 1:
            return scales.reshape(1, 1)
        scales = scales[:, None] if scales.dim() == 1 else scales
        # alone, or for each row, or for as many columns each as there are scales; or as the config says
        blocks = self._form.block or tuple(n // s or 1 for n, s in zip(whole, scales.shape, strict=True))
        if tuple(-(-n // block) for n, block in zip(whole, blocks, strict=True)) != tuple(scales.shape):
            raise ModelError(
                f"{name} has scales of shape {list(scales.shape)} for {list(whole)} numbers.",
                "Check that config.json belongs to these weights.",
            )
        spans = [range(n) for n in whole]
        if part is not None:
            spans[part.axis] = range(part.start, part.stop)
        rows, columns = (
            torch.tensor(span, device=scales.device) // block
            for span, block in zip(spans, blocks, strict=True)
        )
        # a single column of scales need not be spread: it broadcasts
        return scales[rows] if scales.shape[1] == 1 else scales[rows][:, columns]


def unpack(words_NW: Tensor, bits: int, columns: int) -> Tensor:
    """int8 [N, columns]: signed integers that lie in words of 32 bits, lowest first, each with half its range
    added."""
    shifts = torch.arange(0, _WORD_BITS, bits, device=words_NW.device, dtype=torch.int32)
    numbers_NWP = (words_NW[..., None] >> shifts) & ((1 << bits) - 1)
    return (numbers_NWP.flatten(1)[:, :columns] - (1 << (bits - 1))).to(torch.int8)
