"""The whole core: what routers and workers say, and what they are told."""

from collections import Counter

import pytest

from decodefleet.cluster.scheduling.chain import Chain
from decodefleet.cluster.scheduling.scheduler import GlobalScheduler
from decodefleet.cluster.scheduling.view import WorkerKey
from decodefleet.worker.protocol import (
    Acknowledge,
    Fenced,
    Heartbeat,
    Refusal,
    Release,
    RouterReport,
    Started,
    Welcome,
)

ROUTER = "router"


def spread(scheduler, make, count: int, now: float = 0.1, **place) -> Counter[str]:
    """Workers that `count` requests placed at the same moment went to."""
    workers: Counter[str] = Counter()
    for number in range(count):
        for placement in make.placed(
            scheduler.place(make.place(f"r{number}", **place), ROUTER, now)
        ).values():
            workers[placement.worker_id] += 1
    scheduler.check_integrity()
    return workers


def refusals(outgoing) -> dict[str, str]:
    return {
        each.message.request_id: each.message.reason for each in outgoing if isinstance(each.message, Refusal)
    }


def heartbeat(make, worker_id: str = "w0", incarnation: str = "one", **stats) -> Heartbeat:
    return Heartbeat(worker_id=worker_id, incarnation=incarnation, stats=make.stats(**stats))


def test_place_start_release(make):
    scheduler = make.scheduler(1)
    placement = make.placed(scheduler.place(make.place("a"), ROUTER, 1.0))["a"]
    assert (placement.worker_id, placement.incarnation, placement.endpoint, placement.epoch) == (
        "w0",
        "one",
        "tcp://w0:1",
        1,
    )
    assert placement.predicted_s == pytest.approx(0.01 + 0.064 + 0.001, rel=1e-3)
    key = WorkerKey("w0", "one")
    assert scheduler.ledger.load(key).prefill_tokens == 64
    scheduler.started(Started(request_id="a"), ROUTER, 2.0)
    assert scheduler.ledger.load(key).prefill_tokens == 0
    assert scheduler.ledger.load(key).sequences == 1
    for _ in range(2):
        assert scheduler.release(Release(request_id="a", generated=9), ROUTER, 3.0) == []
    assert len(scheduler.ledger) == 0
    scheduler.check_integrity()


@pytest.mark.parametrize("policy", ["cost", "round-robin", "least-load"])
def test_unlike_requests_spread(make, policy):
    workers = spread(make.scheduler(2, policy=policy), make, 64)
    assert max(workers.values()) <= 1.5 * min(workers.values())


def test_burst_at_equal_stale_reports_spreads(make):
    """No report comes between: only the scheduler's own reservations tell the workers apart."""
    workers = spread(make.scheduler(8, bind_ahead_s=100), make, 160)
    assert set(workers.values()) == {20}


def test_reports_that_lag_do_not_herd(make):
    """An idle report from before the burst must not hide what was placed since."""
    scheduler = make.scheduler(2)
    first = spread(scheduler, make, 10)
    scheduler.heartbeat(heartbeat(make, "w0"), 0.2)
    scheduler.heartbeat(heartbeat(make, "w1"), 0.2)
    assert set(first.values()) == {5}
    key = WorkerKey("w0", "one")
    assert scheduler.fleet.view(scheduler.fleet.find(key)).load.sequences == 5


def test_load_is_not_counted_twice(make):
    """Once the worker reports what was placed on it, report and reservation are the same load."""
    scheduler = make.scheduler(1)
    spread(scheduler, make, 4)
    stats = {"running": 1, "waiting": 3, "waiting_prefill_tokens": 4 * 64, "running_kv_tokens": 64}
    scheduler.heartbeat(heartbeat(make, **stats), 0.2)
    key = WorkerKey("w0", "one")
    member = scheduler.fleet.find(key)
    assert scheduler.fleet.view(member).load == scheduler.ledger.load(key)


def test_load_of_others_counts(make):
    """What an earlier scheduler placed there is seen in reports, until it ends."""
    scheduler = make.scheduler(2)
    busy = {"running": 30, "running_kv_tokens": 3000, "free_blocks": 700}
    scheduler.heartbeat(heartbeat(make, "w0", **busy), 0.1)
    assert spread(scheduler, make, 8) == {"w1": 8}
    scheduler.heartbeat(heartbeat(make, "w0"), 0.2)
    assert make.placed(scheduler.place(make.place("next"), ROUTER, 0.3))["next"].worker_id == "w0"


def test_shared_prefix_goes_to_its_holder(make):
    scheduler = make.scheduler(4)
    prefix = make.hashes(32)
    workers = Counter()
    for number in range(100):
        now = 1.0 + number
        for worker in range(4):
            scheduler.heartbeat(heartbeat(make, f"w{worker}"), now)
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
    spread(scheduler, make, 64)
    for number in range(64):
        scheduler.started(Started(request_id=f"r{number}"), ROUTER, 1.0)
        scheduler.release(Release(request_id=f"r{number}", generated=20), ROUTER, 2.0)
    scheduler.heartbeat(heartbeat(make, "w0", running=32, running_kv_tokens=3000), 2.1)
    scheduler.heartbeat(heartbeat(make, "w1"), 2.1)
    place = {"prompt_tokens": 520, "block_hashes": b"".join(prefix)}
    assert spread(scheduler, make, 1, now=2.1, **place) == {"w0": 1}


def test_load_that_outlives_its_release_counts(make):
    """It was not ours after all, or the worker hangs: soon it is believed."""
    scheduler = make.scheduler(2)
    spread(scheduler, make, 64)
    for number in range(64):
        scheduler.release(Release(request_id=f"r{number}", generated=20), ROUTER, 2.0)
    for worker, running in (("w0", 32), ("w1", 0)):
        scheduler.heartbeat(heartbeat(make, worker, running=running, running_kv_tokens=100 * running), 3.5)
    assert spread(scheduler, make, 8) == {"w1": 8}


def test_prompt_that_waits_in_its_holder_is_not_counted_whole(make):
    """Until its first step a worker does not know that most of it is cached; the reservation does."""
    scheduler = make.scheduler(2)
    prefix = make.hashes(16)
    scheduler.index.stored(WorkerKey("w0", "one"), prefix)
    place = {"prompt_tokens": 280, "block_hashes": b"".join(prefix)}
    assert spread(scheduler, make, 1, **place) == {"w0": 1}
    scheduler.heartbeat(heartbeat(make, "w0", waiting=1, waiting_prefill_tokens=280), 0.1)
    scheduler.started(Started(request_id="r0"), ROUTER, 0.12)
    scheduler.release(Release(request_id="r0", generated=4), ROUTER, 0.13)
    assert spread(scheduler, make, 1, **place) == {"w0": 1}


def test_shared_prefix_leaves_a_holder_with_a_long_queue(make):
    scheduler = make.scheduler(2)
    prefix = make.hashes(32)
    scheduler.index.stored(WorkerKey("w0", "one"), prefix)
    place = {"prompt_tokens": 520, "block_hashes": b"".join(prefix)}
    assert spread(scheduler, make, 1, **place) == {"w0": 1}
    scheduler.release(Release(request_id="r0"), ROUTER, 0.1)
    # longer ago than a report may lag, so that what waits is somebody else's
    scheduler.heartbeat(heartbeat(make, "w0", waiting=1, waiting_prefill_tokens=5000), 1.2)
    assert make.placed(scheduler.place(make.place("b", **place), ROUTER, 1.3))["b"].worker_id == "w1"


def test_memory_of_dispatch_without_a_directory(make):
    scheduler = make.scheduler(4)
    place = {"prompt_tokens": 32 * 16, "block_hashes": b"".join(make.hashes(32))}
    first = make.placed(scheduler.place(make.place("a", **place), ROUTER, 0.0))["a"].worker_id
    scheduler.started(Started(request_id="a"), ROUTER, 0.1)
    scheduler.release(Release(request_id="a", generated=1), ROUTER, 0.2)
    for now in range(1, 100):
        for worker in range(4):
            scheduler.heartbeat(heartbeat(make, f"w{worker}"), float(now))
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
        scheduler.heartbeat(heartbeat(make), float(now))
        scheduler.router_report(RouterReport(router_id=ROUTER, live=("a",)), float(now))
        scheduler.tick(float(now))
        assert scheduler.index.hits(Chain.of(make.hashes(4)))
    scheduler.started(Started(request_id="a"), ROUTER, 30.0)
    for now in range(30, 36):
        scheduler.heartbeat(heartbeat(make), float(now))
        scheduler.tick(float(now))
    assert scheduler.index.hits(Chain.of(make.hashes(4))) == {}


def test_without_late_binding_requests_wait_in_workers(make):
    scheduler = make.scheduler(1, late_binding=False, stats={"max_running": 1})
    assert spread(scheduler, make, 3) == {"w0": 3}
    assert len(scheduler.queue) == 0


def test_a_policy_of_ones_own(make):
    class Last:
        name = "last"

        def choose(self, views, demand, hits, rng):
            return views[-1]

    scheduler = GlobalScheduler(1, policy=Last())
    for worker in ("w0", "w1"):
        scheduler.register(make.register(worker), 0.0)
    assert spread(scheduler, make, 3) == {"w1": 3}
    assert scheduler.log.explain("r0")[0]["policy"] == "last"


def test_late_binding(make):
    """A request that would queue behind a worker's own memory waits here until there is room."""
    scheduler = make.scheduler(1, stats={"max_running": 2})
    assert spread(scheduler, make, 4) == {"w0": 2}
    assert len(scheduler.queue) == 2
    assert list(make.placed(scheduler.release(Release(request_id="r0"), ROUTER, 0.2))) == ["r2"]
    assert list(make.placed(scheduler.release(Release(request_id="r1"), ROUTER, 0.3))) == ["r3"]
    scheduler.check_integrity()


def test_late_binding_by_blocks(make):
    scheduler = make.scheduler(1, stats={"total_blocks": 20, "free_blocks": 20})
    assert spread(scheduler, make, 4) == {"w0": 3}
    assert list(make.placed(scheduler.release(Release(request_id="r1"), ROUTER, 0.2))) == ["r3"]


def test_stale_report_does_not_hold_up_a_freed_place(make):
    scheduler = make.scheduler(1, stats={"max_running": 2})
    spread(scheduler, make, 3)
    scheduler.heartbeat(heartbeat(make, running=2, max_running=2), 0.2)
    assert "r2" in make.placed(scheduler.release(Release(request_id="r0"), ROUTER, 0.21))


def test_queue_order_is_priority_then_arrival(make):
    scheduler = make.scheduler(1, stats={"max_running": 1})
    for request_id, priority in (("running", 0), ("late", 1), ("first", 0), ("second", 0), ("urgent", -1)):
        scheduler.place(make.place(request_id, priority=priority), ROUTER, 0.1)
    order, current = [], "running"
    for _ in range(4):
        (current,) = make.placed(scheduler.release(Release(request_id=current), ROUTER, 0.2))
        order.append(current)
    assert order == ["urgent", "first", "second", "late"]


def test_large_request_is_not_overtaken(make):
    scheduler = make.scheduler(1, stats={"total_blocks": 30, "free_blocks": 30})
    spread(scheduler, make, 2)
    scheduler.place(make.place("large", prompt_tokens=400), ROUTER, 0.2)
    scheduler.place(make.place("small"), ROUTER, 0.3)
    assert make.placed(scheduler.release(Release(request_id="r0"), ROUTER, 0.4)) == {}
    assert "large" in make.placed(scheduler.release(Release(request_id="r1"), ROUTER, 0.5))


def test_models_do_not_wait_for_each_other(make):
    scheduler = make.scheduler(1, stats={"max_running": 1})
    scheduler.register(make.register("other", model="n"), 0.0)
    spread(scheduler, make, 2)
    assert make.placed(scheduler.place(make.place("b", model="n"), ROUTER, 0.2))["b"].worker_id == "other"


def test_full_queue_refuses_with_advice(make):
    scheduler = make.scheduler(1, stats={"max_running": 1}, max_queue=1)
    spread(scheduler, make, 2)
    (outgoing,) = scheduler.place(make.place("c"), ROUTER, 0.1)
    assert outgoing.message.reason == "queue_full"
    assert outgoing.message.retry_after_s >= 1
    assert scheduler.refused == {"queue_full": 1}
    # who is refused holds nothing
    assert len(scheduler.ledger) == len(scheduler.queue) == 1


def test_deadline(make):
    scheduler = make.scheduler(1, stats={"max_running": 1})
    scheduler.place(make.place("a"), ROUTER, 0.0)
    scheduler.place(make.place("b", deadline_s=1.5), ROUTER, 0.0)
    assert refusals(scheduler.tick(1.4)) == {}
    assert refusals(scheduler.tick(1.5)) == {"b": "deadline"}
    assert len(scheduler.queue) == 0


def test_withdrawn_while_waiting(make):
    scheduler = make.scheduler(1, stats={"max_running": 1})
    spread(scheduler, make, 2)
    scheduler.release(Release(request_id="r1"), ROUTER, 0.2)
    assert len(scheduler.queue) == 0
    assert make.placed(scheduler.release(Release(request_id="r0"), ROUTER, 0.3)) == {}
    scheduler.check_integrity()


def test_attempts(make):
    scheduler = make.scheduler(2)
    first = make.placed(scheduler.place(make.place("a"), ROUTER, 0.0))["a"]
    # the same again: the same answer, and no second reservation
    assert make.placed(scheduler.place(make.place("a"), ROUTER, 0.1))["a"] == first
    second = make.placed(
        scheduler.place(make.place("a", attempt=1, exclude=(first.worker_id,)), ROUTER, 0.2)
    )["a"]
    assert second.worker_id != first.worker_id
    assert second.attempt == 1
    assert len(scheduler.ledger) == 1
    # late news of the first attempt
    assert scheduler.place(make.place("a"), ROUTER, 0.3) == []
    scheduler.started(Started(request_id="a"), ROUTER, 0.3)
    scheduler.release(Release(request_id="a"), ROUTER, 0.3)
    (held,) = scheduler.ledger
    assert held.placement == second
    assert not held.started
    scheduler.release(Release(request_id="a", attempt=1), ROUTER, 0.4)
    assert len(scheduler.ledger) == 0


def test_late_release_leaves_a_newer_attempt_waiting(make):
    scheduler = make.scheduler(1, stats={"max_running": 1})
    spread(scheduler, make, 1)
    scheduler.place(make.place("a", attempt=1), ROUTER, 0.2)
    scheduler.release(Release(request_id="a", attempt=0), ROUTER, 0.3)
    assert "a" in make.placed(scheduler.release(Release(request_id="r0"), ROUTER, 0.4))


def test_same_request_id_at_two_routers(make):
    scheduler = make.scheduler(1)
    for router in ("one", "two"):
        assert "a" in make.placed(scheduler.place(make.place("a"), router, 0.0))
    scheduler.release(Release(request_id="a"), "one", 0.1)
    assert [held.key.router_id for held in scheduler.ledger] == ["two"]


def test_excluded_worker_is_used_again_after_its_restart(make):
    scheduler = make.scheduler(1)
    assert make.placed(scheduler.place(make.place("a", attempt=1, exclude=("w0",)), ROUTER, 1.0)) == {}
    assert "a" in make.placed(scheduler.register(make.register("w0", "two"), 1.5))


def test_excluded_worker_that_goes_on_living_is_used_again(make):
    scheduler = make.scheduler(1)
    scheduler.place(make.place("a", attempt=1, exclude=("w0",)), ROUTER, 1.0)
    assert make.placed(scheduler.heartbeat(heartbeat(make), 3.9)) == {}
    assert "a" in make.placed(scheduler.heartbeat(heartbeat(make), 4.1))


def test_who_waits_out_an_exclusion_holds_up_nobody(make):
    scheduler = make.scheduler(1, stats={"max_running": 2})
    scheduler.place(make.place("a", attempt=1, exclude=("w0",)), ROUTER, 1.0)
    assert "b" in make.placed(scheduler.place(make.place("b"), ROUTER, 1.1))
    spread(scheduler, make, 2, now=1.2)
    assert list(make.placed(scheduler.release(Release(request_id="b"), ROUTER, 1.3))) == ["r1"]
    # once it may, it comes first again
    scheduler.place(make.place("c"), ROUTER, 1.4)
    scheduler.heartbeat(heartbeat(make, max_running=2), 4.1)
    assert list(make.placed(scheduler.release(Release(request_id="r0"), ROUTER, 4.2))) == ["a"]


def test_silent_worker_is_fenced_before_any_tick(make):
    scheduler = make.scheduler(2, bind_ahead_s=100)
    scheduler.index.stored(WorkerKey("w0", "one"), make.hashes(30))
    scheduler.heartbeat(heartbeat(make, "w1"), 3.5)
    place = {"prompt_tokens": 500, "block_hashes": b"".join(make.hashes(30))}
    assert spread(scheduler, make, 4, now=3.6, **place) == {"w1": 4}


def test_draining_worker_is_fenced(make):
    scheduler = make.scheduler(2)
    scheduler.heartbeat(heartbeat(make, "w0", draining=True), 0.0)
    assert spread(scheduler, make, 4) == {"w1": 4}


def test_stalled_worker_is_fenced_and_a_long_prefill_is_not(make):
    scheduler = make.scheduler(2)
    scheduler.heartbeat(heartbeat(make, "w0", busy_for_s=100.0), 0.0)
    assert spread(scheduler, make, 4) == {"w1": 4}
    scheduler = make.scheduler(1)
    scheduler.heartbeat(heartbeat(make, "w0", busy_for_s=100.0, waiting_prefill_tokens=50_000), 0.0)
    assert spread(scheduler, make, 1) == {"w0": 1}


def test_dead_worker_loses_its_reservations(make):
    scheduler = make.scheduler(2)
    spread(scheduler, make, 4)
    scheduler.heartbeat(heartbeat(make, "w1"), 3.5)
    outgoing = scheduler.tick(4.0)
    assert {held.worker.worker_id for held in scheduler.ledger} == {"w1"}
    assert scheduler.heartbeat(heartbeat(make, "w0"), 4.1)[0].message == Acknowledge(epoch=1, known=False)
    (told,) = [each.message for each in outgoing if isinstance(each.message, Welcome)]
    assert told.fenced == (Fenced("w0", "one", "silent"),)
    assert told.ready == ("m",)
    scheduler.check_integrity()


def test_new_incarnation_fences_the_old_one(make):
    scheduler = make.scheduler(1)
    spread(scheduler, make, 3)
    scheduler.index.stored(WorkerKey("w0", "one"), make.hashes(3))
    scheduler.register(make.register("w0", "two"), 1.0)
    assert len(scheduler.ledger) == 0
    assert scheduler.index.hits(Chain.of(make.hashes(3))) == {}
    # the old one was only frozen, and wakes up
    assert scheduler.heartbeat(heartbeat(make, "w0", "one"), 1.1) == []
    assert scheduler.register(make.register("w0", "one"), 1.2) == []
    assert scheduler.fleet.keys() == {WorkerKey("w0", "two")}
    scheduler.check_integrity()


def test_old_incarnation_stays_fenced_when_it_was_thought_dead(make):
    scheduler = make.scheduler(1)
    scheduler.tick(4.0)
    assert scheduler.fleet.keys() == set()
    scheduler.register(make.register("w0", "two"), 5.0)
    assert scheduler.register(make.register("w0", "one"), 5.1) == []
    assert scheduler.fleet.keys() == {WorkerKey("w0", "two")}


def test_worker_that_was_cut_off_comes_back(make):
    scheduler = make.scheduler(1)
    scheduler.tick(4.0)
    scheduler.register(make.register("w0", "one"), 5.0)
    assert spread(scheduler, make, 1, now=5.1) == {"w0": 1}


def test_routers_hear_of_models_and_readiness(make):
    scheduler = make.scheduler(0)
    welcomes = []

    def hear(outgoing) -> None:
        welcomes.extend(each.message for each in outgoing if isinstance(each.message, Welcome))

    hear(scheduler.register(make.register(), 0.0))
    hear(scheduler.register(make.register(), 0.1))
    scheduler.heartbeat(heartbeat(make, draining=True), 0.2)
    hear(scheduler.tick(0.3))
    scheduler.heartbeat(heartbeat(make), 0.4)
    hear(scheduler.tick(0.5))
    hear(scheduler.tick(4.5))
    assert [welcome.ready for welcome in welcomes] == [("m",), (), ("m",), ()]
    assert all(welcome.models == (make.card(),) for welcome in welcomes)


def test_model_whose_workers_are_away_waits_then_refuses(make):
    scheduler = make.scheduler(1, no_worker_grace_s=5.0)
    scheduler.tick(4.0)
    assert scheduler.place(make.place("a"), ROUTER, 6.0) == []
    scheduler.router_report(RouterReport(router_id=ROUTER, live=("a",)), 10.0)
    assert refusals(scheduler.tick(10.9)) == {}
    assert refusals(scheduler.tick(11.0)) == {"a": "no_worker"}
    scheduler.place(make.place("b"), ROUTER, 12.0)
    assert "b" in make.placed(scheduler.register(make.register("w0", "two"), 13.0))


def test_grace_counts_from_the_loss_for_who_waited_before(make):
    scheduler = make.scheduler(1, no_worker_grace_s=5.0, stats={"max_running": 1}, report_grace_s=100)
    spread(scheduler, make, 2)
    for now in range(1, 9):
        scheduler.heartbeat(heartbeat(make, max_running=1), float(now))
    scheduler.hello(ROUTER, 9.0)
    assert refusals(scheduler.tick(11.1)) == {}
    assert refusals(scheduler.tick(16.0)) == {}
    assert refusals(scheduler.tick(16.2)) == {"r1": "no_worker"}


def test_unknown_model_is_refused_at_once(make):
    scheduler = make.scheduler(1)
    assert refusals(scheduler.place(make.place("a", model="nobody's"), ROUTER, 0.1)) == {"a": "unknown_model"}


def test_before_the_first_worker_no_model_is_unknown(make):
    scheduler = make.scheduler(0)
    assert scheduler.place(make.place("a"), ROUTER, 0.1) == []
    scheduler.place(make.place("b", model="nobody's"), ROUTER, 0.1)
    assert "a" in make.placed(scheduler.register(make.register(), 5.0))
    scheduler.heartbeat(heartbeat(make), 10.0)
    scheduler.hello(ROUTER, 10.0)
    assert refusals(scheduler.tick(10.1)) == {"b": "unknown_model"}


@pytest.mark.parametrize(("prompt_tokens", "reason"), [(8191, None), (8192, "too_long"), (10**9, "too_long")])
def test_too_long_for_the_model(make, prompt_tokens, reason):
    scheduler = make.scheduler(1)
    outgoing = scheduler.place(make.place("a", prompt_tokens=prompt_tokens), ROUTER, 0.1)
    assert refusals(outgoing).get("a") == reason


def test_too_large_for_every_pool(make):
    scheduler = make.scheduler(1, stats={"total_blocks": 10, "free_blocks": 10})
    (outgoing,) = scheduler.place(make.place("a", prompt_tokens=160), ROUTER, 0.1)
    assert outgoing.message.reason == "too_long"
    assert "10" in outgoing.message.message
    assert "a" in make.placed(scheduler.place(make.place("a", prompt_tokens=159), ROUTER, 0.1))


def test_lost_release_is_repaired_by_the_report(make):
    scheduler = make.scheduler(1, stats={"max_running": 2})
    spread(scheduler, make, 3)
    report = RouterReport(router_id=ROUTER, live=("r1",))
    # too fresh to judge
    scheduler.router_report(report, 0.2)
    assert len(scheduler.ledger) == 2
    assert len(scheduler.queue) == 1
    scheduler.router_report(report, 3.2)
    assert [held.key.request_id for held in scheduler.ledger] == ["r1"]
    assert len(scheduler.queue) == 0
    scheduler.check_integrity()


def test_router_that_falls_silent_gives_everything_back(make):
    scheduler = make.scheduler(1, stats={"max_running": 1})
    spread(scheduler, make, 3)
    scheduler.place(make.place("other"), "another", 9.0)
    scheduler.heartbeat(heartbeat(make, max_running=1), 10.0)
    outgoing = scheduler.tick(10.2)
    assert scheduler.routers == ("another",)
    assert list(make.placed(outgoing)) == ["other"]
    scheduler.check_integrity()


def test_router_that_never_said_hello_is_greeted(make):
    scheduler = make.scheduler(1)
    greeting, placement = scheduler.place(make.place("a"), "survivor", 0.1)
    assert (greeting.message.epoch, greeting.message.ready) == (1, ("m",))
    assert placement.message.request_id == "a"


def test_lengths_are_learned(make):
    scheduler = make.scheduler(1)
    for number in range(300):
        scheduler.place(make.place(f"r{number}", max_new_tokens=4000, n=2), ROUTER, 0.1)
        scheduler.release(Release(request_id=f"r{number}", generated=2000), ROUTER, 0.1)
    scheduler.place(make.place("a", max_new_tokens=4000), ROUTER, 0.1)
    scheduler.place(make.place("b", max_new_tokens=50), ROUTER, 0.1)
    expected = {each["request_id"]: each["expected_tokens"] for each in scheduler.log.recent(2)}
    assert 950 < expected["a"] <= 1000
    assert expected["b"] == 50


def test_decisions_explain_themselves(make):
    scheduler = make.scheduler(2, decision_log=3)
    scheduler.index.stored(WorkerKey("w1", "one"), make.hashes(4))
    place = make.place("a", prompt_tokens=70, block_hashes=b"".join(make.hashes(4)))
    scheduler.place(place, ROUTER, 2.0)
    (decision,) = scheduler.log.explain("a")
    assert (decision["worker_id"], decision["hit_tokens"], decision["at"], decision["policy"]) == (
        "w1",
        64,
        2.0,
        "cost",
    )
    assert (decision["tenant"], decision["priority"], decision["returned_to_session"]) == ("", 0, False)
    holder = next(each for each in decision["considered"] if each["worker_id"] == "w1")
    assert holder["hit_blocks"] == {"gpu": 4, "memory": 4, "anywhere": 4}
    assert holder["step_time"]["prefill_token"] == 1e-3
    terms = {each["worker_id"]: each["cost_s"] for each in decision["considered"]}
    assert all(f" {term} " in f" {decision['formula']} " for term in terms["w0"] if term != "total")
    assert set(terms) == {"w0", "w1"}
    assert terms["w1"]["total"] < terms["w0"]["total"]
    for cost in terms.values():
        parts = sum(seconds for term, seconds in cost.items() if term != "total")
        assert cost["total"] == pytest.approx(parts)
    scheduler.place(make.place("b", model="nobody's"), ROUTER, 2.1)
    assert scheduler.log.explain("b")[0]["refused"] == "unknown_model"
    assert [each["request_id"] for each in scheduler.log.recent(9)] == ["b", "a"]
    for number in range(3):
        scheduler.place(make.place(f"r{number}"), ROUTER, 2.2)
    assert scheduler.log.explain("a") == []
    assert len(scheduler.log) == 3


def test_broken_hashes_cost_the_hit_only(make):
    scheduler = make.scheduler(1)
    assert "a" in make.placed(scheduler.place(make.place("a", block_hashes=b"short"), ROUTER, 0.1))


@pytest.mark.parametrize(
    "changes", [{"prompt_tokens": 0}, {"prompt_tokens": -5}, {"n": 0}, {"max_new_tokens": -1}]
)
def test_senseless_numbers_break_no_books(make, changes):
    scheduler = make.scheduler(1)
    scheduler.place(make.place("a", **changes), ROUTER, 0.1)
    scheduler.check_integrity()
    scheduler.release(Release(request_id="a", generated=-3), ROUTER, 0.1)
    scheduler.check_integrity()


def test_a_model_that_sleeps_is_ready_and_its_requests_wait(make):
    def after_its_worker(**config):
        scheduler = make.scheduler(1, no_worker_grace_s=60.0, router_timeout_s=100.0, **config)
        scheduler.tick(10.0)
        scheduler.tick(10.1)
        return scheduler

    assert after_its_worker().welcome.ready == ()
    scheduler = after_its_worker(sleeps=True)
    assert scheduler.welcome.ready == ("m",)
    scheduler.place(make.place("a"), ROUTER, 10.2)
    assert refusals(scheduler.tick(60.0)) == {}
    assert list(make.placed(scheduler.register(make.register("w1"), 61.0))) == ["a"]


def test_of_decisions_as_many_candidates_are_told_as_wanted(make):
    scheduler = make.scheduler(workers=6)
    scheduler.place(make.place("a"), ROUTER, 1.0)
    scheduler.place(make.place("b"), ROUTER, 2.0)
    (latest,) = scheduler.log.recent(9, since=1.0, candidates=2)
    (whole, _) = scheduler.log.recent(9)
    assert latest["request_id"] == "b"
    assert latest["candidates"] == len(whole["considered"]) == 6
    chosen, second = latest["considered"]
    assert chosen["worker_id"] == latest["worker_id"]
    others = [each for each in whole["considered"] if each["worker_id"] != latest["worker_id"]]
    assert second["cost_s"]["total"] == min(each["cost_s"]["total"] for each in others)
