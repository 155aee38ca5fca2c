"""What users of other routers reported, one test each: symptom first, then what is right."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from pydantic import ValidationError

from decodefleet.cluster.scheduling.chain import Chain
from decodefleet.cluster.scheduling.config import SchedulingConfig
from decodefleet.cluster.scheduling.view import WorkerKey
from decodefleet.worker.protocol import Release, RouterReport, Started

ROUTER = "router"
W0, W1 = WorkerKey("w0", "one"), WorkerKey("w1", "one")


def placed_on(scheduler, make, request_id: str, now: float = 0.1, **place) -> str:
    outgoing = scheduler.place(make.place(request_id, **place), ROUTER, now)
    return make.placed(outgoing)[request_id].worker_id


def test_misses_sent_to_the_smallest_cache_hit_the_busiest_worker(make):
    """A miss goes by load, however little or much of anything a worker holds."""
    scheduler = make.scheduler(2)
    scheduler.index.stored(W1, make.hashes(500))
    scheduler.heartbeat(make.heartbeat("w0", running=20, running_kv_tokens=2000), 0.1)
    miss = {"prompt_tokens": 161, "block_hashes": b"".join(make.hashes(10, seed=9))}
    assert {placed_on(scheduler, make, f"r{number}", **miss) for number in range(2)} == {"w1"}


def test_a_path_that_never_counts_load_sends_everything_to_one_worker(make):
    """First attempts, retries, resumed streams, several sequences: all count from dispatch on."""
    scheduler = make.scheduler(2, stats={"max_running": 8})
    paths = [
        {},
        {"attempt": 1, "exclude": ("w0",)},
        {"attempt": 2, "emitted": 5},
        {"n": 2},
        {"session_id": "s"},
    ]
    for number in range(10):
        scheduler.place(make.place(f"r{number}", **paths[number % len(paths)]), ROUTER, 0.1)
    sequences = {key: scheduler.ledger.load(key).sequences for key in (W0, W1)}
    assert sum(sequences.values()) == 12
    assert max(sequences.values()) - min(sequences.values()) <= 3
    for number in range(10):
        scheduler.release(Release(request_id=f"r{number}", attempt=9), ROUTER, 0.2)
    assert len(scheduler.ledger) == 0
    assert all(scheduler.ledger.load(key).sequences == 0 for key in (W0, W1))


def test_load_counted_when_the_answer_begins_comes_too_late(make):
    """Before any Started or report the next request sees the one before."""
    scheduler = make.scheduler(2)
    assert placed_on(scheduler, make, "a") != placed_on(scheduler, make, "b")


def test_imbalance_throws_affinity_away_and_the_hit_rate_collapses(make):
    """A holder that is busier than the others keeps its prefix while that saves more than it costs."""
    scheduler = make.scheduler(4)
    prefix = make.hashes(128)
    scheduler.index.stored(W0, prefix)
    busy = {"running": 3, "running_kv_tokens": 3000}
    scheduler.heartbeat(make.heartbeat("w0", **busy), 0.1)
    hit = {"prompt_tokens": 2060, "block_hashes": b"".join(prefix)}
    assert placed_on(scheduler, make, "a", **hit) == "w0"


def test_a_burst_at_equal_stale_scores_goes_to_one_worker(make):
    scheduler = make.scheduler(4, bind_ahead_s=100.0)
    workers = Counter(placed_on(scheduler, make, f"r{number}") for number in range(40))
    assert set(workers.values()) == {10}


@pytest.mark.parametrize("changes", [{"policy": "precise-prefix"}, {"prefix_weight": 2}])
def test_a_configuration_that_cannot_be_had_is_replaced_silently(changes):
    with pytest.raises(ValidationError):
        SchedulingConfig(**changes)


def test_a_dead_worker_keeps_winning_by_affinity(make):
    scheduler = make.scheduler(2)
    prefix = make.hashes(128)
    scheduler.directory_up = True
    scheduler.index.stored(W0, prefix)
    hit = {"prompt_tokens": 2060, "block_hashes": b"".join(prefix)}
    assert placed_on(scheduler, make, "before", **hit) == "w0"
    scheduler.heartbeat(make.heartbeat("w1"), 3.2)
    # silent, not yet removed, and its entries still there
    assert scheduler.index.hits(Chain.of(prefix))
    assert placed_on(scheduler, make, "after", now=3.3, **hit) == "w1"
    # its next life holds nothing of this one's
    scheduler.register(make.register("w0", "two"), 3.4)
    assert all(worker.incarnation != "two" for worker in scheduler.index.hits(Chain.of(prefix)))


def test_a_removed_worker_is_tried_again_and_again(make):
    scheduler = make.scheduler(2)
    scheduler.heartbeat(make.heartbeat("w1"), 3.2)
    scheduler.tick(3.3)
    chosen = {placed_on(scheduler, make, f"r{number}", now=3.4) for number in range(8)}
    assert chosen == {"w1"}


def test_remembering_prompts_without_bound_ends_in_memory(make):
    scheduler = make.scheduler(2, max_index_blocks=2000, decision_log=50, max_sessions=20, bind_ahead_s=1e9)
    rng = Random(0)
    for number in range(500):
        now = number / 1000
        hashes = rng.randbytes(16 * 64)
        place = {
            "prompt_tokens": 1025,
            "block_hashes": hashes,
            "session_id": str(number),
            "tenant": str(number),
        }
        worker = placed_on(scheduler, make, f"r{number}", now=now, **place)
        scheduler.index.stored(WorkerKey(worker, "one"), Chain(hashes).part(0, 64))
        scheduler.started(Started(request_id=f"r{number}"), ROUTER, now)
        scheduler.release(Release(request_id=f"r{number}", generated=9), ROUTER, now)
    assert len(scheduler.index) <= 2000
    assert len(scheduler.index._recent) <= 2000
    assert len(scheduler.log) == 50
    for now in range(1, 200):
        scheduler.heartbeat(make.heartbeat("w0"), float(now))
        scheduler.router_report(RouterReport(router_id=ROUTER), float(now))
        scheduler.tick(float(now))
    assert len(scheduler.index._recent) == 0
    assert len(scheduler.queue.share("m")) <= 1


def test_a_lookup_that_waits_starves_everything_on_the_event_loop(make):
    """Placement reads its own memory only: with the directory away it answers in the same call."""
    scheduler = make.scheduler(2)
    scheduler.directory_up = False
    hit = {"prompt_tokens": 161, "block_hashes": b"".join(make.hashes(10))}
    first = placed_on(scheduler, make, "a", **hit)
    scheduler.release(Release(request_id="a"), ROUTER, 0.2)
    assert placed_on(scheduler, make, "b", now=0.3, **hit) == first


def test_what_one_router_sent_is_unknown_to_another(make):
    scheduler = make.scheduler(4)
    prompt = {"prompt_tokens": 1025, "block_hashes": b"".join(make.hashes(64))}
    (first,) = make.placed(scheduler.place(make.place("a", **prompt), "one", 0.1)).values()
    scheduler.release(Release(request_id="a"), "one", 0.2)
    (second,) = make.placed(scheduler.place(make.place("a", **prompt), "two", 0.3)).values()
    assert (second.worker_id, second.cached_tokens) == (first.worker_id, 1024)


def test_entries_of_a_worker_that_nobody_knows_are_an_error(make):
    """The directory tells of workers before they register and after they are gone."""
    scheduler = make.scheduler(2)
    scheduler.directory_up = True
    prefix = make.hashes(128)
    hit = {"prompt_tokens": 2060, "block_hashes": b"".join(prefix)}
    scheduler.index.stored(WorkerKey("stranger", "one"), prefix)
    scheduler.index.stored(W0, prefix)
    scheduler.heartbeat(make.heartbeat("w1"), 3.2)
    scheduler.tick(3.3)
    assert {worker.worker_id for worker in scheduler.index.hits(Chain.of(prefix))} == {"stranger", "w0"}
    (placement,) = make.placed(scheduler.place(make.place("a", **hit), ROUTER, 3.4)).values()
    assert (placement.worker_id, placement.cached_tokens, placement.peer) == ("w1", 0, None)
    scheduler.check_integrity()


@pytest.mark.parametrize(
    ("reason", "place"),
    [
        ("queue_full", {}),
        ("unknown_model", {"model": "nobody's"}),
        ("too_long", {"prompt_tokens": 10_000}),
        ("deadline", {"deadline_s": 0.0}),
    ],
)
def test_refused_requests_stay_counted(make, reason, place):
    scheduler = make.scheduler(1, stats={"max_running": 1}, max_queue=1)
    make.spread(scheduler, 2)
    for number in range(20):
        outgoing = scheduler.place(make.place(f"no-{number}", tenant="t", **place), ROUTER, 0.1)
        assert make.refusals(outgoing) == {f"no-{number}": reason}
    scheduler.check_integrity()
    assert (len(scheduler.ledger), len(scheduler.queue)) == (1, 1)
    assert scheduler.ledger.load(W0).sequences == 1
    for request_id in ("r0", "r1"):
        scheduler.release(Release(request_id=request_id), ROUTER, 0.2)
    assert (len(scheduler.ledger), len(scheduler.queue)) == (0, 0)
    assert scheduler.ledger.load(W0).sequences == 0
