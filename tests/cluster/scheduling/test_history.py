"""The recent past: rates, percentiles, and that neither restarts nor newcomers show as jumps."""

import pytest

from decodefleet.cluster.observability.router_metrics import ITL, ITL_BOUNDS_S, TTFT, RouterMetrics
from decodefleet.cluster.scheduling.history import CHANGES, POINTS, STEP_S, History, Now
from decodefleet.cluster.scheduling.overview import overview
from decodefleet.cluster.scheduling.view import WorkerKey
from decodefleet.worker.protocol import RouterCounts, WorkerStats


def stats(generated: int, **fields) -> WorkerStats:
    return WorkerStats(generated_tokens=generated, total_blocks=100, free_blocks=60, **fields)


def key(incarnation: str = "one") -> WorkerKey:
    return WorkerKey("w0", incarnation)


def note(history: History, now: float, workers=None, routers=None, queued: int = 0) -> None:
    assert history.due(now)
    history.note(now, 1000.0 + now, Now(workers or {}, routers or {}, queued))


def test_rates_are_differences_over_time():
    history = History()
    note(history, 0.0, {key(): stats(100, prefix_query_tokens=0)}, {"r": RouterCounts(requests=5)})
    assert history.since(0) == []
    assert not history.due(STEP_S - 0.1)
    after = stats(150, prefix_query_tokens=40, prefix_hit_tokens=10, running=3, prompt_tokens=20)
    note(history, 5.0, {key(): after}, {"r": RouterCounts(requests=15, failures=1)}, queued=2)
    (point,) = history.since(0)
    assert (point.generated_tokens, point.prompt_tokens) == (10.0, 4.0)
    assert (point.requests, point.failures, point.hit_rate) == (2.0, 0.2, 0.25)
    assert (point.running, point.queued, point.workers, point.kv_usage) == (3, 2, 1, 0.4)
    assert point.ttft_s is None
    assert history.since(point.at) == []


def test_a_new_life_is_no_jump():
    history = History()
    note(history, 0.0, {key(): stats(1000)})
    note(history, 5.0, {key("two"): stats(5)}, {"late": RouterCounts(requests=900)})
    note(history, 10.0, {key("two"): stats(15)}, {"late": RouterCounts(requests=905)})
    assert [point.generated_tokens for point in history.since(0)] == [0.0, 2.0]
    assert [point.requests for point in history.since(0)] == [0.0, 1.0]


def test_latencies_are_of_the_last_half_minute():
    history, metrics = History(), RouterMetrics()
    note(history, 0.0, routers={"r": metrics.counts()})
    for _ in range(100):
        metrics.distribution(TTFT, "m").observe(0.4)
        metrics.distribution(ITL, "m").observe(0.015)
    for step in range(1, 9):
        note(history, step * STEP_S, routers={"r": metrics.counts()})
    first, *_, last = history.since(0)
    assert 0.25 < first.ttft_s[0] <= first.ttft_s[2] <= 0.5
    assert 0.01 < first.itl_s[0] <= 0.02
    assert last.ttft_s is None


def test_other_buckets_than_ours_are_left_out():
    history = History()
    note(history, 0.0, routers={"r": RouterCounts(itl=(0,) * 40)})
    note(history, 5.0, routers={"r": RouterCounts(itl=(1,) * 40)})
    assert len(ITL_BOUNDS_S) != 39
    assert history.since(0)[0].itl_s is None


def test_who_came_and_went_is_told():
    def at(worker, incarnation="one"):
        return {WorkerKey(worker, incarnation): stats(0)}

    history = History()
    note(history, 0.0, at("a") | at("b") | at("c"))
    assert history.changes(0) == []
    # drained and gone within one step
    history.drains(WorkerKey("b", "one"))
    note(history, 5.0, at("c", "two") | at("d"))
    note(history, 10.0, at("c", "two") | at("d") | at("a"))
    told = [(change.at, change.worker_id, change.what) for change in history.changes(0)]
    assert told == [
        (1005.0, "a", "lost"),
        (1005.0, "b", "left"),
        (1005.0, "c", "restarted"),
        (1005.0, "d", "came"),
        (1010.0, "a", "came"),
    ]
    assert [change.worker_id for change in history.changes(1005.0)] == ["a"]


def test_memory_is_bounded():
    history = History()
    for step in range(POINTS + 20):
        note(history, step * STEP_S, {key(str(step)): stats(0)})
    assert len(history.since(0)) == POINTS
    assert len(history.changes(0)) == CHANGES


def test_the_overview_says_where_and_why(make):
    scheduler = make.scheduler(6)
    scheduler.place(make.place("a"), "router", 1.0)
    scheduler.place(make.place("b", model="nobody's"), "router", 2.0)
    seen = overview(scheduler, History(), now=2.0, at=5000.0, since=0.0)
    assert [worker["id"] for worker in seen["workers"]] == [f"w{number}" for number in range(6)]
    assert {worker["state"] for worker in seen["workers"]} == {"serving"}
    refused, placed = seen["placements"]
    assert (refused["request_id"], refused["refused"]) == ("b", "unknown_model")
    assert placed["at"] == pytest.approx(4999.0)
    # the chosen one first, and no more than a few of the rest
    assert placed["considered"][0]["worker_id"] == placed["worker_id"]
    assert (len(placed["considered"]), placed["candidates"]) == (4, 6)
    assert sum(worker["reserved"] for worker in seen["workers"]) == 1
    later = overview(scheduler, History(), now=2.0, at=5000.0, since=4999.5)
    assert [decision["request_id"] for decision in later["placements"]] == ["b"]


def test_the_overview_shows_who_is_fenced(make):
    scheduler = make.scheduler(0)
    scheduler.register(make.register("w0", draining=True), 0.0)
    scheduler.register(make.register("w1"), 0.0)
    seen = overview(scheduler, History(), now=10.0, at=10.0, since=0.0)
    assert [worker["state"] for worker in seen["workers"]] != ["serving", "serving"]
    assert seen["workers"][1]["heard_s"] == 10.0
