"""Ranks that tell each other through a process group of torch.distributed: NCCL between GPUs, gloo between
CPUs that have no memory of ours in common."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from ..engine_api import RankLost
from .ranks import Ranks
from .shard import Shard


class GroupRanks(Ranks):
    """ordered: terms of a sum are added by rank, whatever the shape. Two add up to the same in any order."""

    def __init__(self, shard: Shard, group: Any, *, ordered: bool) -> None:
        super().__init__(shard)
        self.recordable = isinstance(group, getattr(dist, "ProcessGroupNCCL", ()))
        self._group = group
        self._gathers = ordered and shard.size > 2

    def sum(self, x_TN: Tensor) -> Tensor:
        if not self._gathers:
            _wait(lambda: self._group.allreduce([x_TN]))
            return x_TN
        first, *rest = self._gather(x_TN)
        total_TN = first.float()
        for part_TN in rest:
            total_TN += part_TN
        return total_TN.to(x_TN.dtype)

    def add_sum(self, x_TN: Tensor, residual_TN: Tensor) -> Tensor | None:
        if not self._gathers:
            return self.sum(x_TN)
        for part_TN in self._gather(x_TN):
            residual_TN += part_TN
        return None

    def join_columns(self, x_RN: Tensor, widest: int, columns: int) -> Tensor:
        if x_RN.shape[1] < widest:
            x_RN = torch.nn.functional.pad(x_RN, (0, widest - x_RN.shape[1]))
        options = dist.GatherOptions()
        options.rootRank = 0
        leads = self.shard.rank == 0
        parts = [torch.empty_like(x_RN) for _ in range(self.shard.size)] if leads else []
        _wait(lambda: self._group.gather([parts] if leads else [], [x_RN], options))
        return torch.cat(parts, dim=1)[:, :columns].contiguous() if leads else x_RN

    def from_leader(self, x: Tensor) -> Tensor:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        _wait(lambda: self._group.broadcast([x], options))
        return x

    def set_patience(self, seconds: float) -> None:
        self._group._set_default_timeout(timedelta(seconds=seconds))

    def _gather(self, x_TN: Tensor) -> tuple[Tensor, ...]:
        """Of all ranks, in their order."""
        size = self.shard.size
        parts_TN = x_TN.new_empty((size * x_TN.shape[0], *x_TN.shape[1:]))
        _wait(lambda: self._group._allgather_base(parts_TN, x_TN))
        return parts_TN.chunk(size)


def join(shard: Shard, device: torch.device, store: Path, *, patience_s: float, ordered: bool) -> GroupRanks:
    """Meet the other ranks of this host by a file that all of them know; returns when all have come."""
    meeting = dist.FileStore(str(store), shard.size)  # type: ignore[attr-defined]
    backend: Any = dist.ProcessGroupNCCL if device.type == "cuda" else dist.ProcessGroupGloo
    options = backend.Options() if device.type == "cuda" else backend._Options()
    options._timeout = timedelta(seconds=patience_s)
    if device.type == "cpu":
        # all ranks are on this host, and nobody else has to reach them
        options._devices = [backend.create_device(interface="lo")]
    return GroupRanks(shard, backend(meeting, shard.rank, shard.size, options), ordered=ordered)


def _wait(start: Callable[[], Any]) -> None:
    try:
        start().wait()
    except RuntimeError as error:
        raise RankLost(f"a rank of the model was lost: {error}") from error
