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
    share, served = FairShare(weights), Counter()
    for tenant in weights:
        share.arrives(tenant, 0.0)
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
    share, served = FairShare({}), Counter()
    share.arrives("there", 0.0)
    for cost in before:
        share.served("there", cost)
    share.arrives("back", idle_until)
    for cost in after:
        tenant = min(("there", "back"), key=share.counter)
        share.served(tenant, cost)
        served[tenant] += cost
    assert abs(served["back"] - served["there"]) <= 2 * LARGEST + 1e-6


@given(st.integers(2, 20), st.integers(1, 200))
def test_nobody_starves(tenants, flood):
    """However much the others have served and waiting, who waits is served within a round."""
    share = FairShare({})
    names = [f"t{number}" for number in range(tenants)]
    for name in names[:-1]:
        share.arrives(name, 0.0)
    for _ in range(flood):
        share.served(min(names[:-1], key=share.counter), 1.0)
    share.arrives(names[-1], 0.0)
    for _ in range(tenants + 1):
        chosen = min(names, key=share.counter)
        share.served(chosen, 1.0)
        if chosen == names[-1]:
            break
    assert chosen == names[-1]


def test_who_waits_already_is_not_lifted_again():
    share = FairShare({})
    share.arrives("slow", 0.0)
    share.arrives("fast", 0.0)
    for _ in range(5):
        share.served("fast", 10.0)
    share.arrives("slow", 1.0)
    assert share.counter("slow") == 0.0


def test_correction_by_what_was_really_taken():
    share = FairShare({"a": 2.0})
    share.arrives("a", 0.0)
    share.served("a", 100.0)
    share.correct("a", -60.0)
    assert share.counter("a") == 20.0
    share.correct("a", -1000.0)
    assert share.counter("a") == 0.0


def test_fraction_is_of_those_who_are_active():
    share = FairShare({"a": 3.0})
    share.arrives("a", 0.0)
    assert share.fraction("a", 0.0) == 1.0
    share.arrives("b", 0.0)
    assert share.fraction("a", 0.0) == 0.75
    share.leaves("b")
    assert share.fraction("a", ACTIVE_S / 2) == 0.75
    assert share.fraction("a", ACTIVE_S + 2) == 1.0


def test_idle_accounts_are_forgotten():
    share = FairShare({})
    for number in range(10_000):
        share.arrives(f"t{number}", 0.0)
        share.leaves(f"t{number}")
        share.served(f"t{number}", 1.0 + number)
    share.arrives("waits", 0.0)
    share.forget_idle(1.0)
    assert len(share) == 4097
    share.forget_idle(ACTIVE_S + 1)
    assert len(share) == 1
    assert share.waiting("waits") == 1
    # who comes again is lifted like a newcomer
    share.arrives("t0", 100.0)
    assert share.counter("t0") == share.counter("new")
