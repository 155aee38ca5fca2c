"""Ranks on CPUs of one host, which tell each other through memory that they share. Terms are always added in
the order of ranks, so that all ranks have the same sums bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from decodefleet.kernels.ops import RankExchange

from ..engine_api import RankLost
from .ranks import Ranks
from .shard import Shard

_NATIVE = (torch.bfloat16, torch.float32)


class SharedRanks(Ranks):
    def __init__(self, shard: Shard, memory: int, *, patience_s: float) -> None:
        """memory: descriptor of `ops.make_exchange`, for as many ranks as there are."""
        super().__init__(shard)
        self._exchange = RankExchange(memory, shard.rank, shard.size, patience_s=patience_s)

    def sum(self, x_TN: Tensor) -> Tensor:
        if x_TN.dtype not in _NATIVE:
            return self.sum(x_TN.float()).to(x_TN.dtype)
        self._exchange.sum_(x_TN)
        self.check()
        return x_TN

    def add_sum(self, x_TN: Tensor, residual_TN: Tensor) -> Tensor | None:
        x_TN = x_TN if x_TN.dtype in _NATIVE else x_TN.float()
        self._exchange.add_sum_(x_TN, residual_TN)
        self.check()
        return None

    def join_columns(self, x_RN: Tensor, widest: int, columns: int) -> Tensor:
        joined_RN = self._exchange.join(x_RN, widest, columns)
        self.check()
        return joined_RN

    def from_leader(self, x: Tensor) -> Tensor:
        self._exchange.from_rank_0(x)
        self.check()
        return x

    def set_patience(self, seconds: float) -> None:
        self._exchange.set_patience(seconds)

    def check(self) -> None:
        if self._exchange.lost:
            raise RankLost("a rank of the model was lost in the middle of a step")
