"""Root-mean-square norms: of the residual stream, of what is added to it, and of heads."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from decodefleet.kernels import ops


@dataclass(frozen=True)
class RmsNorm:
    """weight_D: [hidden]. offset: added to it, unrounded; 1 where checkpoints keep differences from one."""

    weight_D: Tensor
    eps: float
    offset: float = 0.0

    def __call__(self, x_TD: Tensor | None, residual_TD: Tensor) -> Tensor:
        """residual (fp32) += x, in place; its norm."""
        return ops.add_rms_norm_(x_TD, residual_TD, self.weight_D, self.eps, self.offset)

    def add_to(self, x_TD: Tensor, residual_TD: Tensor) -> None:
        """residual (fp32) += the norm of x, in place."""
        ops.norm_add_(x_TD, residual_TD, self.weight_D, self.eps, self.offset)


@dataclass(frozen=True)
class HeadNorms:
    """Norms of single heads. weight_HD: [normed heads, head_dim]; the heads behind them stay as they are."""

    weight_HD: Tensor
    eps: float
    offset: float = 0.0

    def __call__(self, x_THD: Tensor) -> None:
        """In place."""
        ops.norm_heads_(x_THD, self.weight_HD, self.eps, self.offset)
