"""Whom routers are told to leave, and for how long."""

from decodefleet.worker.protocol import Fenced, Heartbeat, Welcome


def told(outgoing):
    welcomes = [each.message for each in outgoing if isinstance(each.message, Welcome)]
    return welcomes[-1].fenced if welcomes else None


def beat(scheduler, make, now, worker_id="w0", incarnation="one", **stats):
    message = Heartbeat(worker_id=worker_id, incarnation=incarnation, stats=make.stats(**stats))
    return scheduler.heartbeat(message, now)


def test_a_silent_worker_is_fenced_until_it_registers_again(make):
    scheduler = make.scheduler(2)
    beat(scheduler, make, 3.5, "w1")
    assert told(scheduler.tick(3.6)) == (Fenced("w0", "one", "silent"),)
    assert told(scheduler.tick(3.7)) is None
    # who asks is told as well, for as long as it matters
    assert told(scheduler.hello("late", 5.0)) == (Fenced("w0", "one", "silent"),)
    beat(scheduler, make, 6.0)
    assert told(scheduler.register(make.register("w0"), 6.0)) == ()
    assert {brief.worker_id for brief in scheduler.hello("late", 6.0)[0].message.workers} == {"w0", "w1"}


def test_a_fence_is_forgotten_in_the_end(make):
    scheduler = make.scheduler(1)
    scheduler.tick(4.0)
    assert told(scheduler.hello("r", 5.0)) == (Fenced("w0", "one", "silent"),)
    scheduler.tick(40.0)
    assert told(scheduler.hello("r", 40.0)) == ()


def test_an_older_life_is_fenced_at_once(make):
    scheduler = make.scheduler(1)
    assert told(scheduler.register(make.register("w0", "two"), 1.0)) == (Fenced("w0", "one", "superseded"),)


def test_a_worker_that_hangs_is_fenced_and_one_that_drains_is_not(make):
    scheduler = make.scheduler(2)
    beat(scheduler, make, 1.0, busy_for_s=100.0)
    beat(scheduler, make, 1.0, "w1", draining=True)
    assert told(scheduler.tick(1.1)) == (Fenced("w0", "one", "stalled"),)
    assert scheduler.hello("r", 1.1)[0].message.workers == ()
    # it was a long step after all
    beat(scheduler, make, 1.2)
    assert told(scheduler.tick(1.3)) == ()


def test_routers_are_told_who_takes_requests_and_how_much_there_is(make):
    scheduler = make.scheduler(1, stats={"max_running": 8})
    scheduler.place(make.place("a", n=3), "r", 0.0)
    (brief,) = scheduler.hello("r", 0.0)[0].message.workers
    assert (brief.worker_id, brief.incarnation, brief.endpoint) == ("w0", "one", "tcp://w0:1")
    assert (brief.model, brief.sequences, brief.max_running) == ("m", 3, 8)
