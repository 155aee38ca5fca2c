"""Requests that no worker can take yet wait in the scheduler."""

from decodefleet.worker.protocol import Release

ROUTER = "router"


def test_without_late_binding_requests_wait_in_workers(make):
    scheduler = make.scheduler(1, late_binding=False, stats={"max_running": 1})
    assert make.spread(scheduler, 3) == {"w0": 3}
    assert len(scheduler.queue) == 0


def test_late_binding(make):
    """A request that would queue behind a worker's own memory waits here until there is room."""
    scheduler = make.scheduler(1, stats={"max_running": 2})
    assert make.spread(scheduler, 4) == {"w0": 2}
    assert len(scheduler.queue) == 2
    assert list(make.placed(scheduler.release(Release(request_id="r0"), ROUTER, 0.2))) == ["r2"]
    assert list(make.placed(scheduler.release(Release(request_id="r1"), ROUTER, 0.3))) == ["r3"]
    scheduler.check_integrity()


def test_late_binding_by_blocks(make):
    scheduler = make.scheduler(1, stats={"total_blocks": 20, "free_blocks": 20})
    assert make.spread(scheduler, 4) == {"w0": 3}
    assert list(make.placed(scheduler.release(Release(request_id="r1"), ROUTER, 0.2))) == ["r3"]


def test_stale_report_does_not_hold_up_a_freed_place(make):
    scheduler = make.scheduler(1, stats={"max_running": 2})
    make.spread(scheduler, 3)
    scheduler.heartbeat(make.heartbeat(running=2, max_running=2), 0.2)
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
    make.spread(scheduler, 2)
    scheduler.place(make.place("large", prompt_tokens=400), ROUTER, 0.2)
    scheduler.place(make.place("small"), ROUTER, 0.3)
    assert make.placed(scheduler.release(Release(request_id="r0"), ROUTER, 0.4)) == {}
    assert "large" in make.placed(scheduler.release(Release(request_id="r1"), ROUTER, 0.5))


def test_models_do_not_wait_for_each_other(make):
    scheduler = make.scheduler(1, stats={"max_running": 1})
    scheduler.register(make.register("other", model="n"), 0.0)
    make.spread(scheduler, 2)
    assert make.placed(scheduler.place(make.place("b", model="n"), ROUTER, 0.2))["b"].worker_id == "other"


def test_full_queue_refuses_with_advice(make):
    scheduler = make.scheduler(1, stats={"max_running": 1}, max_queue=1)
    make.spread(scheduler, 2)
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
    assert make.refusals(scheduler.tick(1.4)) == {}
    assert make.refusals(scheduler.tick(1.5)) == {"b": "deadline"}
    assert len(scheduler.queue) == 0


def test_withdrawn_while_waiting(make):
    scheduler = make.scheduler(1, stats={"max_running": 1})
    make.spread(scheduler, 2)
    scheduler.release(Release(request_id="r1"), ROUTER, 0.2)
    assert len(scheduler.queue) == 0
    assert make.placed(scheduler.release(Release(request_id="r0"), ROUTER, 0.3)) == {}
    scheduler.check_integrity()
