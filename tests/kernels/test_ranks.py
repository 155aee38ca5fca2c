"""Ranks that share memory, as threads of this process: each has its own view of it, as processes have."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from decodefleet.kernels import ops
from decodefleet.kernels.ops import ExchangeMemory, RankExchange
from decodefleet.kernels.ranks.reference import add_sum_ranks_, join_ranks, sum_ranks

pytestmark = pytest.mark.skipif(ops.make_exchange(2) is None, reason="no C++ compiler")
T = TypeVar("T")
DTYPES = [torch.bfloat16, torch.float32]


def on_ranks(ranks: int, run: Callable[[RankExchange, int], T], **options: float) -> list[T]:
    memory = ExchangeMemory(ranks)
    settings = {"patience_s": 30.0, **options}
    members = [RankExchange(memory.fd, rank, ranks, **settings) for rank in range(ranks)]
    memory.close()
    with ThreadPoolExecutor(ranks) as threads:
        return [*threads.map(run, members, range(ranks))]


def parts(ranks: int, *shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(sum(shape))
    return [torch.randn(*shape).to(dtype) for _ in range(ranks)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 16, 100, 576 * 8, 70_001])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_sums(ranks: int, count: int, dtype: torch.dtype) -> None:
    own = parts(ranks, count, dtype=dtype)
    (residual,) = parts(1, count)
    summed, added = sum_ranks(own), residual.clone()
    add_sum_ranks_(own, added)

    def run(exchange: RankExchange, rank: int) -> tuple[Tensor, Tensor]:
        x, total = own[rank].clone(), residual.clone()
        exchange.add_sum_(x, total)
        exchange.sum_(x)
        return x, total

    # slots for a part of the larger ones
    for x, total in on_ranks(ranks, run, slot_bytes=65_536):
        assert torch.equal(x, summed)
        assert torch.equal(total, added)


@pytest.mark.parametrize(("columns", "widest"), [(96, 32), (97, 33), (90, 32), (5, 2), (40_000, 20_000)])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_rows_are_joined_on_rank_0(rows: int, columns: int, widest: int) -> None:
    ranks = -(-columns // widest)
    widths = [min(widest, columns - rank * widest) for rank in range(ranks)]
    own = [torch.randn(rows, width) for width in widths]
    found = on_ranks(
        ranks, lambda exchange, rank: exchange.join(own[rank], widest, columns), slot_bytes=65_536
    )
    assert torch.equal(found[0], join_ranks(own))
    assert all(x is y for x, y in zip(found[1:], own[1:], strict=True))


def test_rank_0_has_the_word() -> None:
    own = [torch.arange(5) + 10 * rank for rank in range(3)]
    on_ranks(3, lambda exchange, rank: exchange.from_rank_0(own[rank]))
    assert all(torch.equal(x, torch.arange(5)) for x in own)


@pytest.mark.parametrize("spin_us", [0.0, 50.0])
def test_whoever_comes_first_the_sum_is_the_same(spin_us: float) -> None:
    turns = 200

    def run(exchange: RankExchange, rank: int) -> list[float]:
        waits, found = random.Random(rank), []
        for turn in range(turns):
            if waits.random() < 0.1:
                time.sleep(0.001)
            x = torch.full((7,), float(turn * (rank + 1)))
            exchange.sum_(x)
            found.append(x[3].item())
        return found

    for found in on_ranks(3, run, spin_us=spin_us):
        assert found == [6.0 * turn for turn in range(turns)]


def test_a_rank_that_does_not_come_ends_it() -> None:
    def run(exchange: RankExchange, rank: int) -> bool:
        exchange.sum_(torch.ones(4))
        if rank == 0:
            exchange.sum_(torch.ones(4))
            # at once, from now on
            exchange.set_patience(1e6)
            exchange.sum_(torch.ones(4))
        return exchange.lost

    assert on_ranks(2, run, patience_s=0.05) == [True, False]


def test_nobody_waits_for_a_rank_that_is_known_to_be_gone() -> None:
    memory = ExchangeMemory(2)
    exchange = RankExchange(memory.fd, 0, 2, patience_s=1e6)
    threading.Timer(0.05, memory.abort).start()
    exchange.sum_(torch.ones(4))
    assert exchange.lost
    memory.close()


def test_sums_can_be_recorded() -> None:
    memory = ExchangeMemory(1)
    exchange = RankExchange(memory.fd, 0, 1, patience_s=1.0)
    memory.close()
    x, residual = torch.ones(32).bfloat16(), torch.zeros(32)

    def run() -> Tensor:
        exchange.add_sum_(x, residual)
        return residual

    _, replay = ops.record(run, ops.RecordingMemory())
    assert replay is not None
    replay()
    replay()
    assert residual.tolist() == [3.0] * 32
