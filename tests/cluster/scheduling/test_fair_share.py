"""Whose turn it is: the bound between tenants that wait all the time, and what idling is worth."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from decodefleet.cluster.scheduling.fair_share import ACTIVE_S, FairShare

LARGEST = 1000.0
WEIGHTS = st.fixed_dictionaries({name: st.sampled_from([0.5, 1.0, 2.0, 8.0]) for name in "abc"})
COSTS = st.lists(st.floats(1.0, LARGEST), min_size=1, max_size=300)


def next_of(share: FairShare, tenants: str) -> str:
    return min(tenants, key=share.counter)


@given(WEIGHTS, COSTS)
def test_served_by_weight_never_differs_by_more_than_two_requests(weights, costs):
    share, served = FairShare(), Counter()
    for tenant, weight in weights.items():
        share.asks(tenant, 1, 0.0, weight)
        share.arrives(tenant)
    for cost in costs:
        tenant = next_of(share, "abc")
        share.served(tenant, cost)
        served[tenant] += cost
        parts = {name: served[name] / weight for name, weight in weights.items()}
        for one in weights:
            for other in weights:
                bound = LARGEST / weights[one] + LARGEST / weights[other]
                assert parts[one] - parts[other] <= bound + 1e-6


@given(COSTS, COSTS, st.floats(0.0, 1e6))
def test_idling_is_not_banked(before, after, idle_until):
    """From its return on, a tenant gets as much as one that was there all the time, within the bound."""
    share, served = FairShare(), Counter()
    share.arrives("there")
    for cost in before:
        share.served("there", cost)
    share.asks("back", 1, idle_until)
    share.arrives("back")
    for cost in after:
        tenant = min(("there", "back"), key=share.counter)
        share.served(tenant, cost)
        served[tenant] += cost
    assert abs(served["back"] - served["there"]) <= 2 * LARGEST + 1e-6


@given(st.integers(2, 20), st.integers(1, 200))
def test_nobody_starves(tenants, flood):
    """However much the others have served and waiting, who waits is served within a round."""
    share = FairShare()
    names = [f"t{number}" for number in range(tenants)]
    for name in names[:-1]:
        share.arrives(name)
    for _ in range(flood):
        share.served(min(names[:-1], key=share.counter), 1.0)
    share.asks(names[-1], 1, 0.0)
    share.arrives(names[-1])
    for _ in range(tenants + 1):
        chosen = min(names, key=share.counter)
        share.served(chosen, 1.0)
        if chosen == names[-1]:
            break
    assert chosen == names[-1]


def test_who_waits_already_is_not_lifted_again():
    share = FairShare()
    share.arrives("slow")
    share.arrives("fast")
    for _ in range(5):
        share.served("fast", 10.0)
    share.asks("slow", 1, 1.0)
    share.arrives("slow")
    assert share.counter("slow") == 0.0


def test_correction_by_what_was_really_taken():
    share = FairShare()
    share.asks("a", 1, 0.0, 2.0)
    share.arrives("a")
    share.served("a", 100.0)
    share.correct("a", -60.0)
    assert share.counter("a") == 20.0
    share.correct("a", -1000.0)
    assert share.counter("a") == 0.0


def max_min_level(demands: dict[str, float], weights: dict[str, float], whole: float) -> float:
    """By filling: the least level, per weight, at which the demands take the whole."""
    level, left, unmet = 0.0, whole, dict(demands)
    while unmet and left > 1e-12:
        step = min(
            left / sum(weights[name] for name in unmet),
            min(need / weights[name] for name, need in unmet.items()),
        )
        level += step
        left -= step * sum(weights[name] for name in unmet)
        unmet = {name: rest for name, need in unmet.items() if (rest := need - step * weights[name]) > 1e-12}
    return level


TENANTS = st.dictionaries(
    st.sampled_from("abcdef"),
    st.tuples(st.integers(0, 50), st.integers(0, 20), st.sampled_from([0.5, 1.0, 4.0])),
    min_size=1,
)


@given(TENANTS)
def test_claims_are_on_whoever_runs_more_than_the_max_min_share(tenants):
    weights = {name: weight for name, (_, _, weight) in tenants.items()}
    running = {name: runs for name, (runs, _, _) in tenants.items()}
    share = FairShare()
    for name, (_, waits, weight) in tenants.items():
        share.asks(name, 1, 0.0, weight)
        for _ in range(waits):
            share.arrives(name)
    demands = {name: runs + waits + 1 for name, (runs, waits, _) in tenants.items()}
    level = max_min_level(demands, weights, sum(running.values()))
    for name, weight in weights.items():
        over = running[name] / weight > level + 1e-9
        assert (share.claims(name, running, 0.0) is not None) == over


def test_claims_are_what_those_with_less_ask_per_second():
    share, now = FairShare(), 0.0
    for number in range(1000):
        now = number * 0.1
        share.asks("small", 2, now)
        share.asks("large", 50, now)
    claims = share.claims("large", {"large": 30, "small": 3}, now)
    assert claims is not None
    assert 18 < claims < 22
    assert share.claims("small", {"large": 30, "small": 3}, now) is None
    # who asks no more claims less and less, and counts for nothing in the end
    later = share.claims("large", {"large": 30}, now + 30)
    assert later is not None
    assert later < 0.1 * claims
    share.asks("large", 1, now + ACTIVE_S + 2)
    assert share.claims("large", {"large": 30}, now + ACTIVE_S + 2) is None


def test_shared_is_what_several_are_active_in():
    share = FairShare()
    share.asks("a", 1, 0.0)
    assert not share.shared(0.0)
    share.asks("b", 1, 0.0)
    assert share.shared(0.0)
    assert share.shared(ACTIVE_S / 2)
    share.asks("a", 1, ACTIVE_S + 2)
    assert not share.shared(ACTIVE_S + 2)


def test_idle_accounts_are_forgotten():
    share = FairShare()
    for number in range(10_000):
        share.asks(f"t{number}", 1, 0.0)
        share.arrives(f"t{number}")
        share.leaves(f"t{number}")
        share.served(f"t{number}", 1.0 + number)
    share.asks("waits", 1, 0.0)
    share.arrives("waits")
    share.forget_idle(1.0)
    assert len(share) == 4097
    share.forget_idle(ACTIVE_S + 1)
    assert len(share) == 1
    assert share.waiting("waits") == 1
    # who comes again is lifted like a newcomer
    share.arrives("t0")
    assert share.counter("t0") == share.counter("new")
