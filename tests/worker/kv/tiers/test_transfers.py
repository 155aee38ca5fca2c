"""Moves of blocks: over when every rank has ended them, and taken in by whoever polls."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest
import torch
from lazy_executor import LazyExecutor
from second_rank import SecondRank

from decodefleet.worker.engine_api import RankLost
from decodefleet.worker.kv.tiers import transfers as module
from decodefleet.worker.kv.tiers.copies import Copies
from decodefleet.worker.kv.tiers.host_memory import HostMemory
from decodefleet.worker.kv.tiers.store import Kind, Moved, Outcome, Piece, Store
from decodefleet.worker.kv.tiers.transfers import Transfers

SLOTS, SLAB = 4, 8
BACK = [Piece(block=1, host=2)]


class DeafExecutor(Executor):
    """Its futures are done and call nobody back: a thread may well be interrupted between the two."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = _DeafFuture()
        future.set_running_or_notify_cancel()
        future.set_result(fn(*args, **kwargs))
        return future


class _DeafFuture(Future[Any]):
    def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
        """Nobody is called."""


def pool(value: int = 0) -> torch.Tensor:
    return torch.full((SLOTS, SLAB), value, dtype=torch.uint8)


def store(slabs: torch.Tensor, executor: Executor) -> Store:
    return Store(Copies(slabs), HostMemory(SLOTS, SLAB, slabs.device), executor, executor, None)


def test_what_was_waited_for_is_taken_in_by_the_next_poll() -> None:
    outcomes: list[Outcome] = []
    transfers = Transfers(store(pool(), DeafExecutor()))
    transfers.wait(transfers.start(Kind.LOAD, BACK, outcomes.append))
    assert not outcomes
    transfers.poll()
    (outcome,) = outcomes
    assert isinstance(outcome, Moved)
    assert outcome.arrived == [True]
    assert transfers.outstanding == 0


def test_what_was_cancelled_says_so() -> None:
    outcomes: list[Outcome] = []
    release = Event()
    with ThreadPoolExecutor(1) as executor:
        transfers = Transfers(store(pool(), executor))
        executor.submit(release.wait)
        assert transfers.cancel(transfers.start(Kind.LOAD, BACK, outcomes.append))
        release.set()
    transfers.poll()
    assert [type(outcome) for outcome in outcomes] == [CancelledError]
    assert transfers.outstanding == 0


def two_ranks(theirs: torch.Tensor) -> tuple[Transfers, LazyExecutor]:
    """Of which the second one works when the test says so."""
    late = LazyExecutor()
    late.hold = True
    other = SecondRank(theirs, None, lambda _: late, late.run)
    other.open(SLOTS, None, 0)
    return Transfers(store(pool(), DeafExecutor()), other), late


def test_a_move_is_over_when_all_ranks_have_made_it() -> None:
    outcomes: list[Outcome] = []
    transfers, late = two_ranks(pool())
    transfers.start(Kind.SAVE, [Piece(block=0, host=2)], outcomes.append)
    transfers.poll()
    assert not outcomes
    assert transfers.outstanding == 1
    late.run()
    transfers.poll()
    assert len(outcomes) == 1


def test_a_step_that_overwrites_waits_for_all_ranks() -> None:
    theirs = pool(7)
    transfers, _ = two_ranks(theirs)
    transfers.wait(transfers.start(Kind.SAVE, [Piece(block=0, host=2)], lambda _: None))
    theirs.zero_()
    transfers.wait(transfers.start(Kind.LOAD, BACK, lambda _: None))
    assert theirs[1].tolist() == [7] * SLAB


def test_a_rank_that_does_not_answer_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.01)
    transfers, late = two_ranks(pool())
    transfer = transfers.start(Kind.SAVE, [Piece(block=0, host=2)], lambda _: None)
    transfers.dispatch()
    late.forget()
    with pytest.raises(RankLost, match="does not answer"):
        transfers.wait(transfer)
