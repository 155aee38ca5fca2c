"""What ranks tell each other, with all their parts at hand."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sum_ranks(parts: Sequence[Tensor]) -> Tensor:
    """The sum of all parts in the order of ranks, in fp32, rounded once to their dtype."""
    total, *rest = (part.float() for part in parts)
    for part in rest:
        total = total + part
    return total.to(parts[0].dtype)


def add_sum_ranks_(parts: Sequence[Tensor], residual: Tensor) -> None:
    """residual (fp32) += each part, in the order of ranks."""
    for part in parts:
        residual += part


def join_ranks(parts: Sequence[Tensor]) -> Tensor:
    """Columns side by side."""
    return torch.cat([*parts], dim=1)
