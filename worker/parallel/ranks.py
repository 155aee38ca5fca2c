"""What the ranks of one model tell each other in the middle of a step: sums, logits, sampled tokens.

Every rank calls the same, in the same order. Where steps are batch-invariant the terms of a sum are added in
an order that does not depend on the shape. Knows tensors, not models; by which way the numbers go is said in
`group_ranks.py` and `shared_ranks.py`.
"""

from __future__ import annotations

from torch import Tensor

from .shard import Shard


class Ranks:
    """One rank's end of it; this one is alone. Raises RankLost where another one does not answer in time.

    recordable: whether sums can be part of a recorded step.
    """

    recordable = True

    def __init__(self, shard: Shard) -> None:
        self.shard = shard

    def sum(self, x_TN: Tensor) -> Tensor:
        """The sum of all ranks' x, in x's dtype; x may be overwritten."""
        return x_TN

    def add_sum(self, x_TN: Tensor, residual_TN: Tensor) -> Tensor | None:
        """Adds the sum of all ranks' x to the residual stream; what it returns is still to be added."""
        return x_TN

    def join_columns(self, x_RN: Tensor, widest: int, columns: int) -> Tensor:
        """On rank 0 all ranks' columns side by side, [R, columns]; x itself on the others.

        widest: columns of one rank at most.
        """
        return x_RN

    def from_leader(self, x: Tensor) -> Tensor:
        """Rank 0's x, which overwrites that of the others."""
        return x

    def set_patience(self, seconds: float) -> None:
        """How long a rank waits for another before it takes it for lost."""

    def check(self) -> None:
        """Behind a recorded step, whose sums raise nothing."""


ALONE = Ranks(Shard())
