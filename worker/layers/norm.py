"""Root-mean-square norm of the residual stream."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from decodefleet.kernels import ops


@dataclass(frozen=True)
class RmsNorm:
    """weight_D: [hidden]."""

    weight_D: Tensor
    eps: float

    def __call__(self, x_TD: Tensor | None, residual_TD: Tensor) -> Tensor:
        """residual (fp32) += x, in place; its norm."""
        return ops.add_rms_norm_(x_TD, residual_TD, self.weight_D, self.eps)
