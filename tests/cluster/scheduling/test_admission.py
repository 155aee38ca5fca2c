"""Who waits, who is refused and who is next, through the whole core."""

from __future__ import annotations

from collections import Counter

from decodefleet.cluster.scheduling.view import WorkerKey
from decodefleet.worker.protocol import Heartbeat, Refusal, Release, Started, StepTime

ROUTER = "router"


def refusals(outgoing) -> dict[str, Refusal]:
    return {each.message.request_id: each.message for each in outgoing if isinstance(each.message, Refusal)}


def release(scheduler, request_id: str, now: float, generated: int = 32):
    return scheduler.release(Release(request_id=request_id, generated=generated), ROUTER, now)


def serve(scheduler, make, running: list[str], turns: int, now: float = 1.0) -> list[str]:
    """End the oldest running request `turns` times; returns who was placed for it."""
    order = []
    for _ in range(turns):
        for request_id in make.placed(release(scheduler, running.pop(0), now)):
            running.append(request_id)
            order.append(request_id)
        scheduler.check_integrity()
    return order


def test_two_tenants_share_a_worker_whoever_came_first(make):
    scheduler = make.scheduler(1, stats={"max_running": 1}, tenant_headroom=0.0)
    for number in range(100):
        scheduler.place(make.place(f"large-{number}", tenant="large"), ROUTER, 0.1)
    for number in range(10):
        scheduler.place(make.place(f"small-{number}", tenant="small"), ROUTER, 0.2)
    order = serve(scheduler, make, ["large-0"], 20)
    assert Counter(name.split("-")[0] for name in order) == {"large": 10, "small": 10}


def test_tenants_are_served_by_weight(make):
    scheduler = make.scheduler(1, stats={"max_running": 1}, tenant_headroom=0.0)
    for number in range(50):
        for tenant, weight in (("a", 4.0), ("b", 1.0)):
            place = make.place(f"{tenant}-{number}", tenant=tenant, tenant_weight=weight)
            scheduler.place(place, ROUTER, 0.1)
    order = serve(scheduler, make, ["a-0"], 50)
    assert Counter(name[0] for name in order)["a"] in (39, 40, 41)


def test_long_answers_are_paid_for_when_they_are_known(make):
    """Both expect 32 tokens; one gets them, the other stops after one: it is served more often."""
    scheduler = make.scheduler(1, stats={"max_running": 1}, tenant_headroom=0.0)
    for number in range(200):
        for tenant in ("long", "short"):
            place = make.place(f"{tenant}-{number}", tenant=tenant, prompt_tokens=1)
            scheduler.place(place, ROUTER, 0.1)
    current, served = "long-0", Counter()
    for _ in range(100):
        generated = 32 if current.startswith("long") else 1
        (current,) = make.placed(release(scheduler, current, 1.0, generated))
        served[current.split("-")[0]] += 1
    assert served["short"] > 10 * served["long"]


def test_cached_tokens_are_not_paid_for(make):
    scheduler = make.scheduler(1, stats={"max_running": 1}, tenant_headroom=0.0)
    hashes = make.hashes(200)
    scheduler.index.stored(WorkerKey("w0", "one"), hashes)
    for number in range(60):
        long = {"prompt_tokens": 3201, "max_new_tokens": 1}
        scheduler.place(make.place(f"miss-{number}", tenant="miss", **long), ROUTER, 0.1)
        hit = {**long, "block_hashes": b"".join(hashes)}
        scheduler.place(make.place(f"hit-{number}", tenant="hit", **hit), ROUTER, 0.1)
    served = Counter(name.split("-")[0] for name in serve(scheduler, make, ["miss-0"], 50))
    assert served["hit"] > 10 * served["miss"]


def test_one_tenant_cannot_fill_the_queue_for_all(make):
    scheduler = make.scheduler(1, stats={"max_running": 1}, max_queue=10)
    for number in range(30):
        scheduler.place(make.place(f"large-{number}", tenant="large"), ROUTER, 0.1)
    assert len(scheduler.queue) == 10
    for number in range(5):
        outgoing = scheduler.place(make.place(f"small-{number}", tenant="small"), ROUTER, 0.1)
        # the large one's latest make room
        assert list(refusals(outgoing)) == [f"large-{10 - number}"]
        scheduler.check_integrity()
    # now they are even, and each refuses its own
    for tenant in ("large", "small"):
        assert list(refusals(scheduler.place(make.place(f"{tenant}-x", tenant=tenant), ROUTER, 0.1))) == [
            f"{tenant}-x"
        ]


def test_room_in_the_queue_is_by_weight(make):
    scheduler = make.scheduler(1, stats={"max_running": 1}, max_queue=10)
    for number in range(40):
        tenant, weight = (("a", 4.0), ("b", 1.0))[number % 2]
        scheduler.place(make.place(f"r{number}", tenant=tenant, tenant_weight=weight), ROUTER, 0.1)
    assert Counter(waiter.place.tenant for waiter in scheduler.queue) == {"a": 8, "b": 2}


def test_many_tenants_leave_room_for_one_more(make):
    scheduler = make.scheduler(1, stats={"max_running": 1}, max_queue=200)
    for number in range(2000):
        scheduler.place(make.place(f"r{number}", tenant=f"t{number % 10}"), ROUTER, 0.1)
    assert "late" not in refusals(scheduler.place(make.place("late", tenant="late"), ROUTER, 0.1))
    assert len(scheduler.queue) == 200


def test_one_models_crowd_leaves_room_for_another_model(make):
    scheduler = make.scheduler(1, stats={"max_running": 1}, max_queue=5)
    scheduler.register(make.register("other", model="n", max_running=1), 0.0)
    for number in range(20):
        scheduler.place(make.place(f"r{number}"), ROUTER, 0.1)
    for number in range(6):
        assert not refusals(scheduler.place(make.place(f"n{number}", model="n"), ROUTER, 0.1))


def test_urgent_request_takes_the_place_of_one_that_can_wait(make):
    scheduler = make.scheduler(1, stats={"max_running": 1}, max_queue=2)
    scheduler.place(make.place("running"), ROUTER, 0.1)
    for name in ("batch-0", "batch-1"):
        scheduler.place(make.place(name, priority=10), ROUTER, 0.1)
    assert list(refusals(scheduler.place(make.place("batch-2", priority=10), ROUTER, 0.1))) == ["batch-2"]
    assert list(refusals(scheduler.place(make.place("chat"), ROUTER, 0.1))) == ["batch-1"]
    assert {waiter.key.request_id for waiter in scheduler.queue} == {"batch-0", "chat"}
    assert list(make.placed(release(scheduler, "running", 0.2))) == ["chat"]


def test_resumed_streams_are_never_refused_for_others_and_go_first(make):
    scheduler = make.scheduler(1, stats={"max_running": 1}, max_queue=1, max_queue_wait_s=0.1)
    scheduler.place(make.place("running"), ROUTER, 0.1)
    scheduler.place(make.place("fresh"), ROUTER, 0.1)
    for number in range(3):
        place = make.place(f"resumed-{number}", emitted=7)
        assert not refusals(scheduler.place(place, ROUTER, 2.0))
    scheduler.check_integrity()
    order = serve(scheduler, make, ["running"], 4)
    assert order == ["resumed-0", "resumed-1", "resumed-2", "fresh"]


def make_slow_queue(make, seconds: float, **config):
    """A scheduler with one seat, which is free every so many seconds, and twenty that wait for it."""
    scheduler = make.scheduler(
        1, stats={"max_running": 1}, worker_timeout_s=1e9, router_timeout_s=1e9, **config
    )
    running, now = "r0", 0.0
    scheduler.place(make.place(running), ROUTER, now)
    for number in range(1, 41):
        scheduler.place(make.place(f"r{number}"), ROUTER, now)
    for _ in range(20):
        now += seconds
        (running,) = make.placed(release(scheduler, running, now))
    return scheduler, now


def test_long_predicted_wait_is_refused_before_the_queue_is_full(make):
    scheduler, now = make_slow_queue(make, 1.0, max_queue_wait_s=15.0)
    assert len(scheduler.queue) == 20
    (refused,) = refusals(scheduler.place(make.place("late"), ROUTER, now)).values()
    assert refused.reason == "queue_full"
    assert 15 < refused.retry_after_s <= 30
    # its tenant waits behind nobody
    assert not refusals(scheduler.place(make.place("other", tenant="other"), ROUTER, now))


def test_deadline_before_the_predicted_turn_is_refused_at_once(make):
    scheduler, now = make_slow_queue(make, 1.0)
    assert not refusals(scheduler.place(make.place("patient", deadline_s=100.0), ROUTER, now))
    # the earliest deadline goes first, so that it is the crowd without any that waits
    assert not refusals(scheduler.place(make.place("hasty", deadline_s=5.0), ROUTER, now))
    refused = refusals(scheduler.place(make.place("too-hasty", deadline_s=0.5), ROUTER, now))
    assert refused["too-hasty"].reason == "queue_full"


def test_quick_queue_takes_as_many_as_it_holds(make):
    scheduler, now = make_slow_queue(make, 0.01, max_queue_wait_s=15.0)
    assert not refusals(scheduler.place(make.place("late"), ROUTER, now))


def test_burst_into_a_queue_of_unknown_pace_is_not_refused(make):
    scheduler = make.scheduler(1, stats={"max_running": 1}, max_queue_wait_s=1.0)
    for number in range(100):
        assert not refusals(scheduler.place(make.place(f"r{number}"), ROUTER, 0.0))


def test_earliest_deadline_goes_first(make):
    scheduler = make.scheduler(1, stats={"max_running": 1})
    scheduler.place(make.place("running"), ROUTER, 0.0)
    for name, deadline in (("never", None), ("late", 90.0), ("soon", 30.0)):
        scheduler.place(make.place(name, deadline_s=deadline), ROUTER, 0.0)
    assert serve(scheduler, make, ["running"], 3) == ["soon", "late", "never"]


def test_deadline_that_no_worker_can_meet_is_refused_at_once(make):
    """4,000 tokens take 4 s here; where they are cached they take none."""
    scheduler = make.scheduler(2)
    place = {"prompt_tokens": 4001, "block_hashes": b"".join(make.hashes(250))}
    refused = refusals(scheduler.place(make.place("a", deadline_s=1.5, **place), ROUTER, 0.1))["a"]
    assert refused.reason == "deadline"
    assert "4.0 s" in refused.message
    # a prediction may be wrong by a factor of two
    assert make.placed(scheduler.place(make.place("b", deadline_s=2.5, **place), ROUTER, 0.1))
    release(scheduler, "b", 0.1)
    scheduler.index.stored(WorkerKey("w1", "one"), make.hashes(250))
    assert make.placed(scheduler.place(make.place("c", deadline_s=1.5, **place), ROUTER, 0.1))
    scheduler.check_integrity()


def test_deadline_that_has_passed_is_never_placed(make):
    scheduler = make.scheduler(1)
    assert refusals(scheduler.place(make.place("a", deadline_s=0.0), ROUTER, 0.1))["a"].reason == "deadline"


def test_prefill_is_bound_late(make):
    """What a worker cannot begin soon waits here, where its place in the order is still open."""
    scheduler = make.scheduler(2, bind_ahead_s=0.5)
    for number in range(6):
        scheduler.place(make.place(f"r{number}", prompt_tokens=600), ROUTER, 0.1)
    assert len(scheduler.ledger) == 2
    scheduler.place(make.place("urgent", priority=-1), ROUTER, 0.2)
    assert list(make.placed(scheduler.started(Started(request_id="r0"), ROUTER, 0.6))) == ["urgent", "r2"]


def test_late_binding_can_be_turned_off(make):
    scheduler = make.scheduler(1, stats={"max_running": 2}, late_binding=False)
    for number in range(6):
        assert make.placed(scheduler.place(make.place(f"r{number}", prompt_tokens=600), ROUTER, 0.1))


def test_tenant_beyond_its_share_leaves_room_for_others(make):
    scheduler = make.scheduler(1, stats={"max_running": 20}, tenant_headroom=0.1, bind_ahead_s=100)
    scheduler.place(make.place("first", tenant="small"), ROUTER, 0.0)
    release(scheduler, "first", 0.0)
    for number in range(40):
        scheduler.place(make.place(f"large-{number}", tenant="large"), ROUTER, 0.1)
    assert len(scheduler.ledger) == 19
    # those who wait do not hold up who has less than its share
    assert make.placed(scheduler.place(make.place("small-1", tenant="small"), ROUTER, 0.2))
    assert not make.placed(scheduler.place(make.place("small-2", tenant="small"), ROUTER, 0.2))
    # what comes free is for those with less, then kept free for them
    assert list(make.placed(release(scheduler, "large-0", 0.3))) == ["small-2"]
    assert not make.placed(release(scheduler, "large-1", 0.3))
    assert len(make.placed(release(scheduler, "large-2", 0.3))) == 1


def test_as_much_is_left_free_as_those_with_less_ask_for(make):
    """Ten a second are asked for, and seats come free once in 0.1 s: three and a chance of more."""
    slow = StepTime(base=0.1, prefill_token=1e-6, kv_token=0.0, sequence=1e-6)
    scheduler = make.scheduler(
        1,
        stats={"max_running": 200, "total_blocks": 9999, "free_blocks": 9999, "step_time": slow},
        tenant_headroom=0.5,
        router_timeout_s=1e9,
        worker_timeout_s=1e9,
    )
    for number in range(300):
        scheduler.place(make.place(f"s{number}", tenant="small"), ROUTER, number * 0.1)
        release(scheduler, f"s{number}", number * 0.1)
    for number in range(300):
        scheduler.place(make.place(f"l{number}", tenant="large"), ROUTER, 30.0)
    assert 200 - len(scheduler.ledger) in (4, 5)


def test_who_was_here_before_and_left_takes_no_share(make):
    """Two of three tenants run something: half is what each may have."""
    scheduler = make.scheduler(1, stats={"max_running": 20}, bind_ahead_s=100)
    scheduler.place(make.place("gone", tenant="gone"), ROUTER, 0.0)
    release(scheduler, "gone", 0.0)
    for number in range(40):
        scheduler.place(make.place(f"large-{number}", tenant="large"), ROUTER, 0.1)
    for number in range(9):
        scheduler.place(make.place(f"small-{number}", tenant="small"), ROUTER, 0.2)
        if number:
            release(scheduler, f"large-{number}", 0.2)
    running = Counter(held.tenant for held in scheduler.ledger)
    assert running == {"large": 11, "small": 9}
    # the last seat as well
    release(scheduler, "large-0", 0.3)
    assert make.placed(scheduler.place(make.place("small-9", tenant="small"), ROUTER, 0.3))


def test_lone_tenant_leaves_nothing_free(make):
    scheduler = make.scheduler(1, stats={"max_running": 20}, tenant_headroom=0.1, bind_ahead_s=100)
    for number in range(40):
        scheduler.place(make.place(f"r{number}", tenant="only"), ROUTER, 0.1)
    assert len(scheduler.ledger) == 20


def test_large_request_beyond_its_share_is_placed_in_the_end(make):
    """Others overtake it up to their share, no further."""
    scheduler = make.scheduler(1, stats={"total_blocks": 40, "free_blocks": 40}, bind_ahead_s=100)
    scheduler.place(make.place("first", tenant="small"), ROUTER, 0.0)
    for number in range(6):
        scheduler.place(make.place(f"large-{number}", tenant="large"), ROUTER, 0.1)
    scheduler.place(make.place("huge", tenant="large", prompt_tokens=500), ROUTER, 0.1)
    for number in range(100):
        scheduler.place(make.place(f"small-{number}", tenant="small"), ROUTER, 0.2)
    running = [held.key.request_id for held in scheduler.ledger]
    assert "huge" in serve(scheduler, make, running, 30)


def test_lost_work_is_not_paid_for(make):
    scheduler = make.scheduler(2)
    scheduler.place(make.place("a", tenant="t"), ROUTER, 0.0)
    assert scheduler.queue.share("m").counter("t") > 0
    scheduler.tick(4.0)
    assert scheduler.queue.share("m").counter("t") == 0


def test_refusing_tries_no_worker_twice(make):
    """Under overload a refusal must cost little: the head that has no room is not tried for each newcomer."""
    scheduler = make.scheduler(1, stats={"max_running": 1}, max_queue=10)
    asked = []
    hits = scheduler.index.hits
    scheduler.index.hits = lambda hashes: asked.append(1) or hits(hashes)
    for number in range(1000):
        scheduler.place(make.place(f"r{number}"), ROUTER, 0.1)
    assert len(asked) == 2


def heartbeat(make, worker_id: str, **stats) -> Heartbeat:
    return Heartbeat(worker_id=worker_id, incarnation="one", stats=make.stats(**stats))


def test_session_returns_to_its_worker_and_is_its_tenants_only(make):
    """Two workers of equal cost: a session stays where it began, and draws no other tenant's there."""
    scheduler = make.scheduler(2)

    def turn(tenant: str, session: int) -> str:
        place = make.place("r", session_id=str(session), tenant=tenant)
        (placement,) = make.placed(scheduler.place(place, ROUTER, 0.1)).values()
        release(scheduler, "r", 0.1)
        return placement.worker_id

    names = [(tenant, session) for session in range(20) for tenant in "ab"]
    first = {name: turn(*name) for name in names}
    assert {name: turn(*name) for name in names} == first
    assert any(first["a", session] != first["b", session] for session in range(20))


def test_session_leaves_a_worker_that_costs_more(make):
    scheduler = make.scheduler(2)
    place = {"session_id": "s", "prompt_tokens": 200}
    (first,) = make.placed(scheduler.place(make.place("a", **place), ROUTER, 0.1)).values()
    release(scheduler, "a", 0.1)
    # 20 ms more on 211 is within the bound, 40 is not
    busy = {"waiting": 1, "running_kv_tokens": 0}
    scheduler.heartbeat(heartbeat(make, first.worker_id, waiting_prefill_tokens=15, **busy), 2.0)
    assert scheduler.fleet.current(first.worker_id).foreign.prefill_tokens == 15
    scheduler.heartbeat(heartbeat(make, first.worker_id, waiting_prefill_tokens=400, **busy), 2.1)
    (second,) = make.placed(scheduler.place(make.place("b", **place), ROUTER, 2.2)).values()
    assert second.worker_id != first.worker_id


def test_sessions_are_bounded(make):
    scheduler = make.scheduler(1, max_sessions=10)
    for number in range(50):
        scheduler.place(make.place(f"r{number}", session_id=f"s{number}"), ROUTER, 0.1)
        release(scheduler, f"r{number}", 0.1)
    assert len(scheduler._placer._sessions) == 10
