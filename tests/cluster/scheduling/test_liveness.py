"""Workers that are silent, drain, hang or begin anew, routers that leave, and what routers hear of it."""

from decodefleet.cluster.scheduling.chain import Chain
from decodefleet.cluster.scheduling.view import WorkerKey
from decodefleet.worker.protocol import Acknowledge, Fenced, Release, RouterReport, Welcome

ROUTER = "router"


def test_excluded_worker_is_used_again_after_its_restart(make):
    scheduler = make.scheduler(1)
    assert make.placed(scheduler.place(make.place("a", attempt=1, exclude=("w0",)), ROUTER, 1.0)) == {}
    assert "a" in make.placed(scheduler.register(make.register("w0", "two"), 1.5))


def test_excluded_worker_that_goes_on_living_is_used_again(make):
    scheduler = make.scheduler(1)
    scheduler.place(make.place("a", attempt=1, exclude=("w0",)), ROUTER, 1.0)
    assert make.placed(scheduler.heartbeat(make.heartbeat(), 3.9)) == {}
    assert "a" in make.placed(scheduler.heartbeat(make.heartbeat(), 4.1))


def test_who_waits_out_an_exclusion_holds_up_nobody(make):
    scheduler = make.scheduler(1, stats={"max_running": 2})
    scheduler.place(make.place("a", attempt=1, exclude=("w0",)), ROUTER, 1.0)
    assert "b" in make.placed(scheduler.place(make.place("b"), ROUTER, 1.1))
    make.spread(scheduler, 2, now=1.2)
    assert list(make.placed(scheduler.release(Release(request_id="b"), ROUTER, 1.3))) == ["r1"]
    # once it may, it comes first again
    scheduler.place(make.place("c"), ROUTER, 1.4)
    scheduler.heartbeat(make.heartbeat(max_running=2), 4.1)
    assert list(make.placed(scheduler.release(Release(request_id="r0"), ROUTER, 4.2))) == ["a"]


def test_silent_worker_is_fenced_before_any_tick(make):
    scheduler = make.scheduler(2, bind_ahead_s=100)
    scheduler.index.stored(WorkerKey("w0", "one"), make.hashes(30))
    scheduler.heartbeat(make.heartbeat("w1"), 3.5)
    place = {"prompt_tokens": 500, "block_hashes": b"".join(make.hashes(30))}
    assert make.spread(scheduler, 4, now=3.6, **place) == {"w1": 4}


def test_draining_worker_is_fenced(make):
    scheduler = make.scheduler(2)
    scheduler.heartbeat(make.heartbeat("w0", draining=True), 0.0)
    assert make.spread(scheduler, 4) == {"w1": 4}


def test_stalled_worker_is_fenced_and_a_long_prefill_is_not(make):
    scheduler = make.scheduler(2)
    scheduler.heartbeat(make.heartbeat("w0", busy_for_s=100.0), 0.0)
    assert make.spread(scheduler, 4) == {"w1": 4}
    scheduler = make.scheduler(1)
    scheduler.heartbeat(make.heartbeat("w0", busy_for_s=100.0, waiting_prefill_tokens=50_000), 0.0)
    assert make.spread(scheduler, 1) == {"w0": 1}


def test_dead_worker_loses_its_reservations(make):
    scheduler = make.scheduler(2)
    make.spread(scheduler, 4)
    scheduler.heartbeat(make.heartbeat("w1"), 3.5)
    outgoing = scheduler.tick(4.0)
    assert {held.worker.worker_id for held in scheduler.ledger} == {"w1"}
    assert scheduler.heartbeat(make.heartbeat("w0"), 4.1)[0].message == Acknowledge(epoch=1, known=False)
    (told,) = [each.message for each in outgoing if isinstance(each.message, Welcome)]
    assert told.fenced == (Fenced("w0", "one", "silent"),)
    assert told.ready == ("m",)
    scheduler.check_integrity()


def test_new_incarnation_fences_the_old_one(make):
    scheduler = make.scheduler(1)
    make.spread(scheduler, 3)
    scheduler.index.stored(WorkerKey("w0", "one"), make.hashes(3))
    scheduler.register(make.register("w0", "two"), 1.0)
    assert len(scheduler.ledger) == 0
    assert scheduler.index.hits(Chain.of(make.hashes(3))) == {}
    # the old one was only frozen, and wakes up
    assert scheduler.heartbeat(make.heartbeat("w0", "one"), 1.1) == []
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
    assert make.spread(scheduler, 1, now=5.1) == {"w0": 1}


def test_routers_hear_of_models_and_readiness(make):
    scheduler = make.scheduler(0)
    welcomes = []

    def hear(outgoing) -> None:
        welcomes.extend(each.message for each in outgoing if isinstance(each.message, Welcome))

    hear(scheduler.register(make.register(), 0.0))
    hear(scheduler.register(make.register(), 0.1))
    scheduler.heartbeat(make.heartbeat(draining=True), 0.2)
    hear(scheduler.tick(0.3))
    scheduler.heartbeat(make.heartbeat(), 0.4)
    hear(scheduler.tick(0.5))
    hear(scheduler.tick(4.5))
    assert [welcome.ready for welcome in welcomes] == [("m",), (), ("m",), ()]
    assert all(welcome.models == (make.card(),) for welcome in welcomes)


def test_model_whose_workers_are_away_waits_then_refuses(make):
    scheduler = make.scheduler(1, no_worker_grace_s=5.0)
    scheduler.tick(4.0)
    assert scheduler.place(make.place("a"), ROUTER, 6.0) == []
    scheduler.router_report(RouterReport(router_id=ROUTER, live=("a",)), 10.0)
    assert make.refusals(scheduler.tick(10.9)) == {}
    assert make.refusals(scheduler.tick(11.0)) == {"a": "no_worker"}
    scheduler.place(make.place("b"), ROUTER, 12.0)
    assert "b" in make.placed(scheduler.register(make.register("w0", "two"), 13.0))


def test_grace_counts_from_the_loss_for_who_waited_before(make):
    scheduler = make.scheduler(1, no_worker_grace_s=5.0, stats={"max_running": 1}, report_grace_s=100)
    make.spread(scheduler, 2)
    for now in range(1, 9):
        scheduler.heartbeat(make.heartbeat(max_running=1), float(now))
    scheduler.hello(ROUTER, 9.0)
    assert make.refusals(scheduler.tick(11.1)) == {}
    assert make.refusals(scheduler.tick(16.0)) == {}
    assert make.refusals(scheduler.tick(16.2)) == {"r1": "no_worker"}


def test_lost_release_is_repaired_by_the_report(make):
    scheduler = make.scheduler(1, stats={"max_running": 2})
    make.spread(scheduler, 3)
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
    make.spread(scheduler, 3)
    scheduler.place(make.place("other"), "another", 9.0)
    scheduler.heartbeat(make.heartbeat(max_running=1), 10.0)
    outgoing = scheduler.tick(10.2)
    assert scheduler.routers == ("another",)
    assert list(make.placed(outgoing)) == ["other"]
    scheduler.check_integrity()


def test_router_that_never_said_hello_is_greeted(make):
    scheduler = make.scheduler(1)
    greeting, placement = scheduler.place(make.place("a"), "survivor", 0.1)
    assert (greeting.message.epoch, greeting.message.ready) == (1, ("m",))
    assert placement.message.request_id == "a"


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
    assert make.refusals(scheduler.tick(60.0)) == {}
    assert list(make.placed(scheduler.register(make.register("w1"), 61.0))) == ["a"]
