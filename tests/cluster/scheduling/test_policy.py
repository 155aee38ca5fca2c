"""Who is chosen, for snapshots made up here; the same through the whole scheduler in test_load.py."""

from collections import Counter
from random import Random

import pytest

from decodefleet.cluster.scheduling.candidates import Candidates
from decodefleet.cluster.scheduling.cost import EVICTED
from decodefleet.cluster.scheduling.policy import POLICIES, CostPolicy, LeastLoad, PrefixOnly, RoundRobin
from decodefleet.cluster.scheduling.view import Demand, Hit, Load

DEMAND = Demand("m", prompt_tokens=512 + 64, expected_tokens=64)
HOLDS_512 = Hit(32, 32)


def choose(policy, views, hits=None, demand=DEMAND, seed=0) -> str:
    return policy.choose(Candidates.of(views), demand, hits or {}, Random(seed)).key.worker_id


@pytest.mark.parametrize("policy", POLICIES.values())
def test_ties_fall_at_random(policy, make):
    views = [make.view(f"w{number}") for number in range(4)]
    chosen = Counter(choose(policy(), views, seed=seed) for seed in range(400))
    assert set(chosen) == {"w0", "w1", "w2", "w3"}
    assert max(chosen.values()) < 160


@pytest.mark.parametrize("policy", POLICIES.values())
def test_names_are_those_of_the_table(policy):
    assert POLICIES[policy().name] is policy


def test_holder_wins(make):
    views = [make.view("w0"), make.view("w1")]
    assert {choose(CostPolicy(), views, {views[1].key: HOLDS_512}, seed=seed) for seed in range(20)} == {"w1"}


def test_holder_with_a_long_queue_loses(make):
    other = make.view("w0")

    def chosen(queued: int) -> str:
        holder = make.view("w1", load=Load(prefill_tokens=queued))
        return choose(CostPolicy(), [other, holder], {holder.key: HOLDS_512})

    # recomputing 512 tokens takes as long as 512 queued ones, and so does each time what they push out
    even = 512 * (1 + EVICTED)
    assert chosen(round(even) - 12) == "w1"
    assert chosen(round(even) + 8) == "w0"


def test_a_miss_goes_by_load(make):
    busy, idle = make.view("w0", load=Load(sequences=8)), make.view("w1", load=Load(sequences=2))
    assert choose(CostPolicy(), [busy, idle]) == "w1"


def test_affinity_is_traded_continuously(make):
    """The more of the prompt is cached, the longer a queue is worth waiting in."""
    other = make.view("w0")

    def break_even(blocks: int) -> int:
        for queued in range(0, 3000, 8):
            holder = make.view("w1", load=Load(prefill_tokens=queued))
            if choose(CostPolicy(), [other, holder], {holder.key: Hit(blocks, blocks)}) == "w0":
                return queued
        raise AssertionError("the holder always wins")

    points = [break_even(blocks) for blocks in (4, 8, 16, 32)]
    assert points == sorted(set(points))


def test_hits_are_worth_more_the_busier_the_fleet_is(make):
    """What a prefill costs those who will run beside it counts wherever it goes."""
    busier = Load(prefill_tokens=600 + round(512 * EVICTED), sequences=0)

    def chosen(elsewhere: int) -> str:
        views = [make.view("w0"), make.view("w1", load=busier)]
        views += [make.view("w2", load=Load(sequences=elsewhere, prefill_tokens=10_000))]
        return choose(CostPolicy(), views, {views[1].key: HOLDS_512})

    assert (chosen(0), chosen(30)) == ("w0", "w1")


def test_slower_worker_gets_less(make):
    slow = make.view(
        "w0",
        step_time=make.stats().step_time.__class__(
            base=0.1, prefill_token=1e-2, kv_token=1e-6, sequence=1e-2
        ),
    )
    quick = make.view("w1", load=Load(prefill_tokens=1000, sequences=2))
    assert choose(CostPolicy(), [slow, quick]) == "w1"


def test_round_robin(make):
    views = [make.view("w0", last_placed=7), make.view("w1", last_placed=5), make.view("w2", last_placed=6)]
    assert choose(RoundRobin(), views) == "w1"


def test_least_load(make):
    views = [make.view("w0", load=Load(sequences=3)), make.view("w1", load=Load(sequences=2))]
    assert choose(LeastLoad(), views, {views[0].key: HOLDS_512}) == "w1"


def test_prefix_only(make):
    views = [make.view("w0", load=Load(sequences=30)), make.view("w1")]
    assert choose(PrefixOnly(), views, {views[0].key: Hit(1, 1)}) == "w0"
    assert choose(PrefixOnly(), views) == "w1"
