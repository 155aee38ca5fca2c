"""What ranks tell each other, by either way, as threads of this process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from decodefleet.kernels import ops
from decodefleet.kernels.ranks.reference import join_ranks
from decodefleet.worker.engine_api import RankLost
from decodefleet.worker.parallel.group_ranks import join
from decodefleet.worker.parallel.ranks import Ranks
from decodefleet.worker.parallel.shard import Shard
from decodefleet.worker.parallel.shared_ranks import SharedRanks

T = TypeVar("T")
WAYS = [
    "group",
    pytest.param("shared", marks=pytest.mark.skipif(ops.make_exchange(2) is None, reason="no C++ compiler")),
]


def on_ranks(way: str, size: int, folder: Path, run: Callable[[Ranks], T]) -> list[T]:
    memory = ops.make_exchange(size) if way == "shared" else None

    def one(rank: int) -> T:
        shard = Shard(rank, size)
        if memory is not None:
            return run(SharedRanks(shard, memory.fd, patience_s=20))
        return run(join(shard, torch.device("cpu"), folder / "store", patience_s=20, ordered=True))

    with ThreadPoolExecutor(size) as threads:
        found = [*threads.map(one, range(size))]
    if memory is not None:
        memory.close()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_all_ranks_have_the_same_sums(tmp_path: Path, way: str, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    own, residual = [torch.randn(5, 48).to(dtype) for _ in range(size)], torch.randn(5, 48)

    def run(ranks: Ranks) -> tuple[Tensor, Tensor]:
        x_TN, total_TN = own[ranks.shard.rank], residual.clone()
        left_TN = ranks.add_sum(x_TN.clone(), total_TN)
        return ranks.sum(x_TN.clone()), total_TN if left_TN is None else total_TN + left_TN

    found = on_ranks(way, size, tmp_path, run)
    exact = sum(part.double() for part in own)
    rounding = 4 * torch.finfo(dtype).eps
    for summed, added in found:
        assert summed.dtype == dtype
        assert torch.allclose(summed.double(), exact, rtol=rounding, atol=rounding)
        assert torch.allclose(added.double(), residual + exact, rtol=rounding, atol=rounding)
        assert torch.equal(summed, found[0][0])
        assert torch.equal(added, found[0][1])


@pytest.mark.parametrize("way", WAYS)
def test_rank_0_gets_all_columns_and_has_the_word(tmp_path: Path, way: str) -> None:
    own = [torch.randn(3, 4), torch.randn(3, 4), torch.randn(3, 1)]

    def run(ranks: Ranks) -> tuple[Tensor, Tensor]:
        rank = ranks.shard.rank
        return ranks.join_columns(own[rank], 4, 9), ranks.from_leader(torch.full((2,), 7 + rank))

    found = on_ranks(way, 3, tmp_path, run)
    assert torch.equal(found[0][0], join_ranks(own))
    assert all(tokens.tolist() == [7, 7] for _, tokens in found)


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_does_not_come_is_lost(tmp_path: Path, way: str) -> None:
    def run(ranks: Ranks) -> bool:
        ranks.sum(torch.ones(2))
        if ranks.shard.rank:
            return False
        ranks.set_patience(0.1)
        with pytest.raises(RankLost):
            ranks.sum(torch.ones(2))
        return True

    assert on_ranks(way, 2, tmp_path, run) == [True, False]
