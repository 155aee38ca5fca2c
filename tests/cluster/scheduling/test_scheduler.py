"""The whole core: what routers and workers say, and what they are told."""

import pytest

from decodefleet.cluster.scheduling.scheduler import GlobalScheduler
from decodefleet.cluster.scheduling.view import WorkerKey
from decodefleet.worker.protocol import Release, Started

ROUTER = "router"


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


def test_a_policy_of_ones_own(make):
    class Last:
        name = "last"

        def choose(self, views, demand, hits, rng):
            return views[-1]

    scheduler = GlobalScheduler(1, policy=Last())
    for worker in ("w0", "w1"):
        scheduler.register(make.register(worker), 0.0)
    assert make.spread(scheduler, 3) == {"w1": 3}
    assert scheduler.log.explain("r0")[0]["policy"] == "last"


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
    make.spread(scheduler, 1)
    scheduler.place(make.place("a", attempt=1), ROUTER, 0.2)
    scheduler.release(Release(request_id="a", attempt=0), ROUTER, 0.3)
    assert "a" in make.placed(scheduler.release(Release(request_id="r0"), ROUTER, 0.4))


def test_same_request_id_at_two_routers(make):
    scheduler = make.scheduler(1)
    for router in ("one", "two"):
        assert "a" in make.placed(scheduler.place(make.place("a"), router, 0.0))
    scheduler.release(Release(request_id="a"), "one", 0.1)
    assert [held.key.router_id for held in scheduler.ledger] == ["two"]


def test_unknown_model_is_refused_at_once(make):
    scheduler = make.scheduler(1)
    assert make.refusals(scheduler.place(make.place("a", model="nobody's"), ROUTER, 0.1)) == {
        "a": "unknown_model"
    }


def test_before_the_first_worker_no_model_is_unknown(make):
    scheduler = make.scheduler(0)
    assert scheduler.place(make.place("a"), ROUTER, 0.1) == []
    scheduler.place(make.place("b", model="nobody's"), ROUTER, 0.1)
    assert "a" in make.placed(scheduler.register(make.register(), 5.0))
    scheduler.heartbeat(make.heartbeat(), 10.0)
    scheduler.hello(ROUTER, 10.0)
    assert make.refusals(scheduler.tick(10.1)) == {"b": "unknown_model"}


@pytest.mark.parametrize(("prompt_tokens", "reason"), [(8191, None), (8192, "too_long"), (10**9, "too_long")])
def test_too_long_for_the_model(make, prompt_tokens, reason):
    scheduler = make.scheduler(1)
    outgoing = scheduler.place(make.place("a", prompt_tokens=prompt_tokens), ROUTER, 0.1)
    assert make.refusals(outgoing).get("a") == reason


def test_too_large_for_every_pool(make):
    scheduler = make.scheduler(1, stats={"total_blocks": 10, "free_blocks": 10})
    (outgoing,) = scheduler.place(make.place("a", prompt_tokens=160), ROUTER, 0.1)
    assert outgoing.message.reason == "too_long"
    assert "10" in outgoing.message.message
    assert "a" in make.placed(scheduler.place(make.place("a", prompt_tokens=159), ROUTER, 0.1))


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
