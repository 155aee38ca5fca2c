"""Which failures a request survives: pure."""

from __future__ import annotations

import pytest

from decodefleet.cluster.dataplane.errors import (
    ConsumerTooSlow,
    DataplaneError,
    PlacementRefused,
    RouterStopping,
    SchedulerSilent,
    WorkerFailed,
    WorkerLost,
    WorkerMoved,
    WorkerRejected,
)
from decodefleet.cluster.recovery import (
    MAX_FRUITLESS,
    MAX_LOSSES,
    MAX_OUTDATED,
    MAX_PAUSE_S,
    Again,
    Recovery,
)
from decodefleet.worker.protocol import Refusal, RefusalReason, Rejected, RejectReason

LOST = WorkerLost("gone")
NEVER_REACHED = WorkerLost("gone", reached=False)
DRAINED = WorkerMoved("leaving", "drained")
BROKEN = WorkerMoved("broken", "failed")


def rejected(reason: RejectReason) -> WorkerRejected:
    return WorkerRejected(Rejected(request_id="a", reason=reason, message=""))


def refused(reason: RefusalReason, retry_after_s: float | None = None) -> PlacementRefused:
    return PlacementRefused(Refusal(request_id="a", reason=reason, message="", retry_after_s=retry_after_s))


def survived(error: DataplaneError, *, progress: bool = False, most: int = 100) -> int:
    recovery, count = Recovery(), 0
    while count < most and recovery.after(error, progress=progress, begun=True) is not None:
        count += 1
    return count


@pytest.mark.parametrize("error", [LOST, BROKEN, DRAINED, rejected("draining"), rejected("queue_full")])
def test_failures_in_a_row_are_bounded(error: DataplaneError) -> None:
    assert survived(error) == MAX_FRUITLESS


@pytest.mark.parametrize(
    ("error", "most"), [(LOST, MAX_LOSSES), (BROKEN, MAX_LOSSES), (DRAINED, 100), (rejected("draining"), 100)]
)
def test_tokens_forgive_failures_but_not_lost_workers_without_end(error: DataplaneError, most: int) -> None:
    assert survived(error, progress=True) == most


@pytest.mark.parametrize("error", [NEVER_REACHED, rejected("epoch"), rejected("incarnation")])
def test_old_news_costs_nothing_but_time(error: DataplaneError) -> None:
    assert survived(error) == MAX_OUTDATED
    recovery = Recovery()
    pauses = []
    for _ in range(8):
        again = recovery.after(error, progress=False, begun=False)
        assert again is not None
        assert again.avoid is (error is NEVER_REACHED)
        pauses.append(again.pause_s)
    assert pauses[0] == 0.0
    assert pauses == sorted(pauses)
    assert pauses[-1] == MAX_PAUSE_S
    # nor is it held against the workers that come after
    for _ in range(MAX_FRUITLESS):
        assert recovery.after(LOST, progress=False, begun=False) == Again()


@pytest.mark.parametrize("reason", ["no_worker", "queue_full", "unknown_model"])
def test_only_a_client_in_the_middle_waits_for_room(reason: RefusalReason) -> None:
    recovery = Recovery()
    assert recovery.after(refused(reason), progress=False, begun=False) is None
    again = recovery.after(refused(reason, retry_after_s=30.0), progress=False, begun=True)
    assert again == Again(MAX_PAUSE_S, avoid=False)
    assert survived(refused(reason)) == 100


@pytest.mark.parametrize(
    "error",
    [
        refused("deadline"),
        refused("too_long"),
        rejected("invalid"),
        rejected("deadline"),
        WorkerFailed("not a number"),
        ConsumerTooSlow("slow"),
        SchedulerSilent("silent"),
        RouterStopping("stopping"),
    ],
)
def test_what_is_final_stays_so(error: DataplaneError) -> None:
    assert survived(error) == 0
