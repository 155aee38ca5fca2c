"""Placing by the last snapshot: pure, without sockets."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from decodefleet.cluster.dataplane.last_snapshot import LastSnapshot
from decodefleet.worker.protocol import Place, Welcome, WorkerBrief


def brief(name: str, sequences: int = 0, model: str = "m", most: int | None = 4) -> WorkerBrief:
    return WorkerBrief(
        worker_id=name,
        incarnation="one",
        endpoint=f"tcp://{name}:1",
        model=model,
        sequences=sequences,
        max_running=most,
    )


def welcome(*workers: WorkerBrief, epoch: int = 1) -> Welcome:
    return Welcome(epoch=epoch, models=(), ready=("m",) if workers else (), workers=workers)


def place(request_id: str = "a", n: int = 1, exclude: tuple[str, ...] = (), model: str = "m") -> Place:
    return Place(request_id=request_id, model=model, prompt_tokens=1, max_new_tokens=1, n=n, exclude=exclude)


@pytest.fixture
def snapshot() -> LastSnapshot:
    return LastSnapshot(Random(1))


def fill(snapshot: LastSnapshot, count: int, *, crowd: bool = False) -> Counter[str]:
    spread: Counter[str] = Counter()
    for number in range(count):
        request = place(f"r{number}")
        chosen = snapshot.choose(request, 1, crowd=crowd)
        if chosen is not None:
            snapshot.placed(request, chosen.worker_id)
            spread[chosen.worker_id] += 1
    return spread


def test_the_less_loaded_of_two_is_taken(snapshot: LastSnapshot) -> None:
    snapshot.note(welcome(brief("w0", 2), brief("w1", 0)), believe=False)
    chosen = snapshot.choose(place(), 7, crowd=False)
    assert chosen is not None
    assert (chosen.worker_id, chosen.incarnation, chosen.endpoint) == ("w1", "one", "tcp://w1:1")
    assert chosen.epoch == 7
    # what was placed since counts: both end up as full as can be, and then nobody has room
    assert fill(snapshot, 8) == {"w0": 2, "w1": 4}
    assert snapshot.choose(place(), 1, crowd=False) is None
    assert snapshot.choose(place(), 1, crowd=True) is not None


def test_what_ended_makes_room(snapshot: LastSnapshot) -> None:
    snapshot.note(welcome(brief("w0")), believe=False)
    assert fill(snapshot, 5) == {"w0": 4}
    # the snapshot has them now, and they are not counted twice
    snapshot.note(welcome(brief("w0", 4)), believe=False)
    assert snapshot.choose(place(), 1, crowd=False) is None
    snapshot.released("r0")
    snapshot.released("r0")
    assert snapshot.choose(place(n=2), 1, crowd=False) is None
    assert snapshot.choose(place(), 1, crowd=False) is not None


def test_who_is_excluded_fenced_lost_or_of_another_model_is_not_taken(snapshot: LastSnapshot) -> None:
    names = ("w0", "w1", "w2", "w3", "w4")
    snapshot.note(
        welcome(*(brief(name, model="other" if name == "w3" else "m") for name in names)), believe=False
    )
    snapshot.lose(("w1", "one"))
    snapshot.lose(("w4", "another life"))
    snapshot.lose(("w2", "one"))
    assert fill(snapshot, 40, crowd=True).keys() == {"w0", "w4"}
    assert snapshot.choose(place(exclude=("w0", "w4")), 1, crowd=True) is None
    assert snapshot.models == {"m", "other"}


def test_a_scheduler_that_has_just_begun_is_not_believed(snapshot: LastSnapshot) -> None:
    assert snapshot.note(welcome(brief("w0")), believe=False)
    assert not snapshot.note(welcome(epoch=2), believe=False)
    assert snapshot.models == {"m"}
    assert snapshot.note(welcome(brief("w1"), epoch=2), believe=False)
    assert snapshot.choose(place(exclude=("w0",)), 2, crowd=False) is not None
    # one that is known says that nobody is left
    assert snapshot.note(welcome(epoch=2), believe=False)
    assert not snapshot.models


def test_believed_in_the_end(snapshot: LastSnapshot) -> None:
    snapshot.note(welcome(brief("w0")), believe=False)
    assert snapshot.note(welcome(epoch=2), believe=True)
    assert not snapshot.models
