"""What a worker is thought to have to do, by what was placed there and what it reports; and who is chosen."""

from collections import Counter

import pytest

from decodefleet.cluster.scheduling.chain import Chain
from decodefleet.cluster.scheduling.view import WorkerKey
from decodefleet.worker.protocol import Release, RouterReport, Started

ROUTER = "router"


@pytest.mark.parametrize("policy", ["cost", "round-robin", "least-load"])
def test_unlike_requests_spread(make, policy):
    workers = make.spread(make.scheduler(2, policy=policy), 64)
    assert max(workers.values()) <= 1.5 * min(workers.values())


def test_burst_at_equal_stale_reports_spreads(make):
    """No report comes between: only the scheduler's own reservations tell the workers apart."""
    workers = make.spread(make.scheduler(8, bind_ahead_s=100), 160)
    assert set(workers.values()) == {20}


def test_reports_that_lag_do_not_herd(make):
    """An idle report from before the burst must not hide what was placed since."""
    scheduler = make.scheduler(2)
    first = make.spread(scheduler, 10)
    scheduler.heartbeat(make.heartbeat("w0"), 0.2)
    scheduler.heartbeat(make.heartbeat("w1"), 0.2)
    assert set(first.values()) == {5}
    key = WorkerKey("w0", "one")
    assert scheduler.fleet.view(scheduler.fleet.find(key)).load.sequences == 5


def test_load_is_not_counted_twice(make):
    """Once the worker reports what was placed on it, report and reservation are the same load."""
    scheduler = make.scheduler(1)
    make.spread(scheduler, 4)
    stats = {"running": 1, "waiting": 3, "waiting_prefill_tokens": 4 * 64, "running_kv_tokens": 64}
    scheduler.heartbeat(make.heartbeat(**stats), 0.2)
    key = WorkerKey("w0", "one")
    member = scheduler.fleet.find(key)
    assert scheduler.fleet.view(member).load == scheduler.ledger.load(key)


def test_load_of_others_counts(make):
    """What an earlier scheduler placed there is seen in reports, until it ends."""
    scheduler = make.scheduler(2)
    busy = {"running": 30, "running_kv_tokens": 3000, "free_blocks": 700}
    scheduler.heartbeat(make.heartbeat("w0", **busy), 0.1)
    assert make.spread(scheduler, 8) == {"w1": 8}
    scheduler.heartbeat(make.heartbeat("w0"), 0.2)
    assert make.placed(scheduler.place(make.place("next"), ROUTER, 0.3))["next"].worker_id == "w0"


def test_shared_prefix_goes_to_its_holder(make):
    scheduler = make.scheduler(4)
    prefix = make.hashes(32)
    workers = Counter()
    for number in range(100):
        now = 1.0 + number
        for worker in range(4):
            scheduler.heartbeat(make.heartbeat(f"w{worker}"), now)
        hashes = b"".join([*prefix, *make.hashes(4, seed=number + 1)])
        place = make.place(f"r{number}", prompt_tokens=36 * 16, block_hashes=hashes)
        placement = make.placed(scheduler.place(place, ROUTER, now))[f"r{number}"]
        workers[placement.worker_id] += 1
        assert placement.cached_tokens >= (512 if number else 0)
        # the directory confirms what was computed
        holder = WorkerKey(placement.worker_id, placement.incarnation)
        scheduler.index.stored(holder, prefix)
        scheduler.started(Started(request_id=f"r{number}"), ROUTER, now)
        scheduler.release(Release(request_id=f"r{number}", generated=20), ROUTER, now)
        scheduler.tick(now)
    assert max(workers.values()) == 100


def test_report_from_before_the_end_does_not_bring_a_burst_back(make):
    """Reports are as old as a step and a heartbeat: they still show what has been released since."""
    scheduler = make.scheduler(2)
    prefix = make.hashes(32)
    scheduler.index.stored(WorkerKey("w0", "one"), prefix)
    make.spread(scheduler, 64)
    for number in range(64):
        scheduler.started(Started(request_id=f"r{number}"), ROUTER, 1.0)
        scheduler.release(Release(request_id=f"r{number}", generated=20), ROUTER, 2.0)
    scheduler.heartbeat(make.heartbeat("w0", running=32, running_kv_tokens=3000), 2.1)
    scheduler.heartbeat(make.heartbeat("w1"), 2.1)
    place = {"prompt_tokens": 520, "block_hashes": b"".join(prefix)}
    assert make.spread(scheduler, 1, now=2.1, **place) == {"w0": 1}


def test_load_that_outlives_its_release_counts(make):
    """It was not ours after all, or the worker hangs: soon it is believed."""
    scheduler = make.scheduler(2)
    make.spread(scheduler, 64)
    for number in range(64):
        scheduler.release(Release(request_id=f"r{number}", generated=20), ROUTER, 2.0)
    for worker, running in (("w0", 32), ("w1", 0)):
        scheduler.heartbeat(make.heartbeat(worker, running=running, running_kv_tokens=100 * running), 3.5)
    assert make.spread(scheduler, 8) == {"w1": 8}


def test_prompt_that_waits_in_its_holder_is_not_counted_whole(make):
    """Until its first step a worker does not know that most of it is cached; the reservation does."""
    scheduler = make.scheduler(2)
    prefix = make.hashes(16)
    scheduler.index.stored(WorkerKey("w0", "one"), prefix)
    place = {"prompt_tokens": 280, "block_hashes": b"".join(prefix)}
    assert make.spread(scheduler, 1, **place) == {"w0": 1}
    scheduler.heartbeat(make.heartbeat("w0", waiting=1, waiting_prefill_tokens=280), 0.1)
    scheduler.started(Started(request_id="r0"), ROUTER, 0.12)
    scheduler.release(Release(request_id="r0", generated=4), ROUTER, 0.13)
    assert make.spread(scheduler, 1, **place) == {"w0": 1}


def test_shared_prefix_leaves_a_holder_with_a_long_queue(make):
    scheduler = make.scheduler(2)
    prefix = make.hashes(32)
    scheduler.index.stored(WorkerKey("w0", "one"), prefix)
    place = {"prompt_tokens": 520, "block_hashes": b"".join(prefix)}
    assert make.spread(scheduler, 1, **place) == {"w0": 1}
    scheduler.release(Release(request_id="r0"), ROUTER, 0.1)
    # longer ago than a report may lag, so that what waits is somebody else's
    scheduler.heartbeat(make.heartbeat("w0", waiting=1, waiting_prefill_tokens=5000), 1.2)
    assert make.placed(scheduler.place(make.place("b", **place), ROUTER, 1.3))["b"].worker_id == "w1"


def test_memory_of_dispatch_without_a_directory(make):
    scheduler = make.scheduler(4)
    place = {"prompt_tokens": 32 * 16, "block_hashes": b"".join(make.hashes(32))}
    first = make.placed(scheduler.place(make.place("a", **place), ROUTER, 0.0))["a"].worker_id
    scheduler.started(Started(request_id="a"), ROUTER, 0.1)
    scheduler.release(Release(request_id="a", generated=1), ROUTER, 0.2)
    for now in range(1, 100):
        for worker in range(4):
            scheduler.heartbeat(make.heartbeat(f"w{worker}"), float(now))
        scheduler.router_report(RouterReport(router_id=ROUTER), float(now))
        scheduler.tick(float(now))
    assert make.placed(scheduler.place(make.place("b", **place), ROUTER, 99.0))["b"].worker_id == first
    # with a directory that does not confirm it, it is soon forgotten
    scheduler.directory_up = True
    scheduler.release(Release(request_id="b"), ROUTER, 99.0)
    for now in (100.0, 103.0):
        scheduler.tick(now)
    assert scheduler.index.hits(Chain.of(make.hashes(32))) == {}


def test_what_waits_in_a_worker_stays_remembered(make):
    scheduler = make.scheduler(1)
    scheduler.directory_up = True
    scheduler.place(make.place("a", prompt_tokens=64, block_hashes=b"".join(make.hashes(4))), ROUTER, 0.0)
    for now in range(1, 30):
        scheduler.heartbeat(make.heartbeat(), float(now))
        scheduler.router_report(RouterReport(router_id=ROUTER, live=("a",)), float(now))
        scheduler.tick(float(now))
        assert scheduler.index.hits(Chain.of(make.hashes(4)))
    scheduler.started(Started(request_id="a"), ROUTER, 30.0)
    for now in range(30, 36):
        scheduler.heartbeat(make.heartbeat(), float(now))
        scheduler.tick(float(now))
    assert scheduler.index.hits(Chain.of(make.hashes(4))) == {}
