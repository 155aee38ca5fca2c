"""The order in which requests leave the queue, and its books."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decodefleet.cluster.scheduling.chain import Chain
from decodefleet.cluster.scheduling.pace import Pace, turns_until
from decodefleet.cluster.scheduling.queue import Waiter, WaitQueue
from decodefleet.cluster.scheduling.reservations import RequestKey
from decodefleet.cluster.scheduling.view import Demand
from decodefleet.worker.protocol import Place


def make_waiter(number: int, *, deadline: float | None = None, resumed: bool = False, **place) -> Waiter:
    fields = {"request_id": f"r{number}", "model": "m", "prompt_tokens": 1, "max_new_tokens": 1}
    return Waiter(
        key=RequestKey("router", f"r{number}"),
        place=Place(**fields | place),
        demand=Demand("m", 1, 1),
        chain=Chain(b""),
        arrived=float(number),
        number=number,
        deadline=deadline,
        resumed=resumed,
    )


def make_queue(*waiters: Waiter, limit: int = 1000, **weights: float) -> WaitQueue:
    queue = WaitQueue(limit)
    for tenant, weight in weights.items():
        queue.share("m").asks(tenant, 1, 0.0, weight)
    for waiter in waiters:
        queue.push(waiter)
    return queue


def drained(queue: WaitQueue, cost: float = 1.0) -> list[int]:
    """Numbers in the order in which they leave; each takes `cost` of its tenant's share."""
    order = []
    while (waiter := queue.next("m")) is not None:
        queue.remove(waiter.key)
        queue.share("m").served(waiter.place.tenant, cost)
        queue.check_integrity()
        order.append(waiter.number)
    return order


def test_priority_then_tenant_then_deadline_then_arrival():
    queue = make_queue(
        make_waiter(0, priority=1),
        make_waiter(1, tenant="a", deadline=9.0),
        make_waiter(2, tenant="a"),
        make_waiter(3, tenant="a", deadline=5.0),
        make_waiter(4, tenant="b"),
        make_waiter(5, priority=-1),
        make_waiter(6, resumed=True, tenant="a"),
    )
    assert drained(queue) == [5, 6, 4, 3, 1, 2, 0]
    assert len(queue) == 0
    assert queue.models() == []


def test_weights():
    waiters = [make_waiter(number, tenant="ab"[number % 2]) for number in range(60)]
    order = drained(make_queue(*waiters, a=3.0))
    first = ["ab"[number % 2] for number in order[:40]]
    assert first.count("a") == 30


def test_who_is_passed_over_holds_up_nobody():
    first, second, third = make_waiter(0, tenant="a"), make_waiter(1, tenant="a"), make_waiter(2, tenant="b")
    queue = make_queue(first, second, third)
    assert queue.next("m", passed={first.key}) is second
    assert queue.next("m", held_back={"a"}) is third
    assert queue.next("m", passed={third.key}, held_back={"a"}) is None
    assert queue.next("nobody's") is None


@given(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from("abc"), st.none() | st.floats(0, 9)), max_size=60)
)
def test_an_urgent_class_goes_before_all_others_and_deadlines_order_a_line(requests):
    waiters = [
        make_waiter(number, priority=priority, tenant=tenant, deadline=deadline)
        for number, (priority, tenant, deadline) in enumerate(requests)
    ]
    order = [waiters[number] for number in drained(make_queue(*waiters))]
    assert [each.place.priority for each in order] == sorted(each.place.priority for each in waiters)
    for priority in range(3):
        for tenant in "abc":
            line = [w.rank for w in order if (w.place.priority, w.place.tenant) == (priority, tenant)]
            assert line == sorted(line)


def test_who_yields():
    urgent, batch, later = make_waiter(0), make_waiter(1, priority=5), make_waiter(2, priority=5)
    queue = make_queue(urgent, batch, later)
    assert queue.who_yields(urgent) is later
    assert queue.who_yields(batch) is batch
    # whose client has read a part of it is not given up for others
    queue.push(make_waiter(3, priority=9, resumed=True))
    assert queue.who_yields(urgent) is later
    queue.push(other := make_waiter(4, priority=5, tenant="other"))
    assert queue.who_yields(other) is later
    assert queue.who_yields(later) is later


def test_pace_knows_nothing_until_somebody_waits():
    pace = Pace()
    assert pace.interval_s(100.0) == 0.0
    pace.moved(100.0)
    assert pace.interval_s(100.0) == 0.0


def test_pace_counts_waiting_time_only():
    pace, now = Pace(), 0.0
    for _ in range(50):
        pace.waits(now, running=1)
        for _ in range(10):
            now += 0.2
            pace.moved(now)
        pace.rests(now)
        now += 1000.0
    assert pace.interval_s(now) == pytest.approx(0.2, rel=0.05)


def test_pace_does_not_count_who_never_waited():
    pace = Pace()
    pace.waits(0.0, running=1)
    for now in (1.0, 2.0, 3.0):
        pace.moved(now)
    pace.rests(3.0)
    before = pace.interval_s(3.0)
    for number in range(100):
        pace.moved(4.0 + number)
    assert pace.interval_s(104.0) == before > 0.5


def test_pace_sees_a_standstill():
    pace = Pace()
    pace.waits(0.0, running=1)
    assert pace.interval_s(7.0) == 3.5
    assert pace.interval_s(70.0) == 35.0


def test_pace_of_many_is_not_judged_by_the_time_before_the_first_ends():
    """64 begin together and end together after 5 s: each time it is 5/64 s from one to the next."""
    pace, now = Pace(), 0.0
    for _ in range(3):
        pace.waits(now, running=64)
        assert pace.interval_s(now + 4.9) <= 2 * 5 / 64
        now += 5.0
        for _ in range(64):
            pace.moved(now)
        assert pace.interval_s(now) <= 1.5 * 5 / 64
        pace.rests(now)
        now += 1000.0


def test_pace_follows_a_fleet_that_fills_while_somebody_waits():
    """Long prompts: a wait begins when few run. 512 then end together after 10 s."""
    pace = Pace()
    for now, running in ((0.0, 4), (0.5, 100), (1.0, 512)):
        pace.waits(now, running)
    assert pace.interval_s(10.0) <= 10 / 512
    for _ in range(512):
        pace.moved(10.0)
    pace.waits(10.0, running=512)
    assert pace.interval_s(20.0) <= 2 * 10 / 512


def test_pace_remembers_a_wait_in_vain():
    pace = Pace()
    for begin in (0.0, 100.0):
        pace.waits(begin, running=1)
        pace.rests(begin + 20.0)
    assert pace.interval_s(120.0) == 20.0


def test_turns_of_a_lone_tenant_are_its_place_in_the_line():
    waiters = [make_waiter(number) for number in range(5)]
    queue = make_queue(*waiters)
    assert [turns_until(each, queue) for each in waiters] == [1, 2, 3, 4, 5]


def test_turns_of_a_small_tenant_do_not_grow_with_the_large_ones_line():
    crowd = [make_waiter(number, tenant="large") for number in range(100)]
    small = make_waiter(100, tenant="small")
    assert turns_until(small, make_queue(*crowd, small)) == 2
    heavy = make_queue(*crowd, small, small=4.0)
    assert turns_until(small, heavy) == pytest.approx(1.25)


def test_turns_count_urgent_ones_and_not_those_behind():
    queue = make_queue(make_waiter(0, priority=-1), make_waiter(1, priority=3), mine := make_waiter(2))
    assert turns_until(mine, queue) == 2


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=60))
def test_turns_are_never_more_than_those_who_wait(tenants):
    waiters = [make_waiter(number, tenant=tenant) for number, tenant in enumerate(tenants)]
    queue = make_queue(*waiters)
    order = drained(make_queue(*waiters))
    for waiter in waiters:
        turns = turns_until(waiter, queue)
        assert 1 <= turns <= len(waiters)
        # with requests of one size the estimate is off by less than a round
        assert abs(turns - 1 - order.index(waiter.number)) < len(set(tenants))
