"""Every term is what it says, in seconds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decodefleet.cluster.scheduling.candidates import Candidates, with_room
from decodefleet.cluster.scheduling.cost import (
    EVICTED,
    FLOOR,
    LATER,
    LINKS,
    PRESENT,
    PRIOR,
    bounded,
    cost_of,
    mean_running,
    total_costs,
    usable,
)
from decodefleet.cluster.scheduling.view import NO_HIT, Demand, Hit, Load
from decodefleet.worker.protocol import StepTime, TierStats

DEMAND = Demand("m", prompt_tokens=160, expected_tokens=100)


def test_idle_worker_costs_one_step(make):
    cost = cost_of(make.view(), DEMAND, NO_HIT)
    assert cost.start == cost.restore == cost.slowdown == 0
    # base, 160 uncached tokens, one sequence, 160 tokens read
    assert cost.compute == pytest.approx(0.01 + 0.160 + 0.001 + 160e-7)
    # 160 tokens written push out as many
    assert cost.evict == pytest.approx(EVICTED * 0.160)
    assert cost.first_token_s == cost.compute
    assert cost.total == pytest.approx(cost.compute + cost.evict)


def test_queue_is_waited_for(make):
    cost = cost_of(make.view(load=Load(prefill_tokens=2000)), DEMAND, NO_HIT)
    assert cost.start == pytest.approx(2.0)


def test_cached_tokens_are_not_computed(make):
    full = cost_of(make.view(), DEMAND, NO_HIT)
    half = cost_of(make.view(), DEMAND, Hit(5, 5))
    assert full.compute - half.compute == pytest.approx(80e-3)
    assert full.evict - half.evict == pytest.approx(EVICTED * 80e-3)
    # one token at least
    all_of_it = cost_of(make.view(), DEMAND, Hit(10, 10))
    assert full.compute - all_of_it.compute == pytest.approx(159e-3)


def with_tiers(make, **bytes_per_s: float):
    """A worker whose computing takes 1 ms a token, and 1 MB of KV each."""
    tiers = {tier: TierStats(latency_s=0.001, bytes_per_s=rate) for tier, rate in bytes_per_s.items()}
    return make.view(card=make.card(kv_bytes_per_token=10**6), tiers=tiers)


def test_blocks_below_gpu_memory_are_brought_back(make):
    cost = cost_of(with_tiers(make, cpu=16e9, nvme=4e9), DEMAND, Hit(7, 2, 5))
    assert cost.restore == pytest.approx(0.001 + 3 * 16e6 / 16e9 + 0.001 + 2 * 16e6 / 4e9)
    assert cost.compute == cost_of(make.view(), DEMAND, Hit(7, 7)).compute


def test_until_a_worker_has_measured_its_tiers_typical_ones_are_assumed(make):
    cost = cost_of(with_tiers(make), DEMAND, Hit(7, 2, 5))
    assert cost.restore == pytest.approx(
        3 * 16e6 / LINKS["cpu"].bytes_per_s + 2 * 16e6 / LINKS["nvme"].bytes_per_s
    )


def test_what_is_computed_faster_than_it_is_brought_back_counts_as_not_cached(make):
    slow_disk = cost_of(with_tiers(make, cpu=16e9, nvme=0.5e9), DEMAND, Hit(7, 2, 5))
    assert slow_disk == cost_of(with_tiers(make, cpu=16e9), DEMAND, Hit(5, 2, 5))
    # what lies behind blocks that are computed is of no use, however near it is
    slow_memory = cost_of(with_tiers(make, cpu=0.5e9, nvme=100e9), DEMAND, Hit(7, 2, 5))
    assert slow_memory == cost_of(with_tiers(make), DEMAND, Hit(2, 2, 2))


def test_slowdown_grows_with_company_and_length(make):
    def slowdown(running: int, expected: int, n: int = 1, mean: float | None = None) -> float:
        view = make.view(load=Load(sequences=running))
        return cost_of(view, Demand("m", 160, expected, n), NO_HIT, mean).slowdown

    assert slowdown(0, 100) == 0
    # each waits for 160 tokens of prefill, then 100 steps that are longer by one sequence
    decode = PRESENT * 3 * 100 * (1e-3 + 210e-7)
    assert slowdown(3, 100) == pytest.approx((PRESENT + LATER) * 3 * 0.160 + decode)
    assert slowdown(3, 100, mean=8.0) == pytest.approx((PRESENT * 3 + LATER * 8) * 0.160 + decode)
    assert slowdown(3, 100, n=2) > slowdown(3, 100)
    assert slowdown(3, 200) > slowdown(3, 100)


def test_windowed_layers_read_no_further_than_their_window(make):
    """Two groups of three see 5 blocks of 16 tokens each."""
    demand, busy = Demand("m", 4000, 100), {"load": Load(sequences=4)}
    full = cost_of(make.view(**busy), demand, NO_HIT)
    windowed = cost_of(make.view(card=make.card(group_blocks=(None, 5, 5)), **busy), demand, NO_HIT)
    read, context = (4000 + 2 * 80) // 3, (4050 + 2 * 80) // 3
    assert full.compute - windowed.compute == pytest.approx((4000 - read) * 1e-7)
    assert full.slowdown - windowed.slowdown == pytest.approx(PRESENT * 4 * 100 * (4050 - context) * 1e-7)


def test_prior_and_floors():
    assert bounded(None) == PRIOR
    nil = StepTime(base=0, prefill_token=0, kv_token=0, sequence=0)
    assert bounded(nil) == FLOOR
    fitted = StepTime(base=1, prefill_token=2, kv_token=3, sequence=4)
    assert bounded(fitted) == fitted


def test_a_worker_whose_fit_is_nil_still_shows_its_load(make):
    nil = StepTime(base=0, prefill_token=0, kv_token=0, sequence=0)
    idle = cost_of(make.view(step_time=nil), DEMAND, NO_HIT)
    queued = cost_of(make.view(step_time=nil, load=Load(prefill_tokens=1)), DEMAND, NO_HIT)
    running = cost_of(make.view(step_time=nil, load=Load(sequences=1)), DEMAND, NO_HIT)
    assert idle.total < queued.total
    assert idle.total < running.total


LOADS = st.builds(
    Load,
    prefill_tokens=st.integers(0, 5000),
    sequences=st.integers(0, 64),
    kv_tokens=st.integers(0, 100_000),
    blocks=st.integers(0, 1000),
)
DEMANDS = st.builds(
    Demand,
    model=st.just("m"),
    prompt_tokens=st.integers(1, 4000),
    expected_tokens=st.integers(1, 2000),
    n=st.integers(1, 4),
)
HITS = st.none() | st.tuples(st.integers(1, 100), st.integers(0, 100), st.integers(0, 100)).map(
    lambda parts: Hit(sum(parts), parts[0], parts[0] + parts[1])
)
SHAPES = st.sampled_from([{}, {"group_blocks": (None, 5, 5)}, {"block_size": 32}])


@given(st.lists(st.tuples(LOADS, HITS, SHAPES), min_size=1, max_size=8), DEMANDS)
def test_added_up_costs_equal_the_formula(make, workers, demand):
    views = [
        make.view(f"w{number}", load=load, card=make.card(**shape))
        for number, (load, _, shape) in enumerate(workers)
    ]
    hits = {view.key: hit for view, (_, hit, _) in zip(views, workers, strict=True) if hit is not None}
    mean = mean_running(views)
    expected = [cost_of(view, demand, hits.get(view.key, NO_HIT), mean).total for view in views]
    assert total_costs(Candidates.of(views), demand, hits) == pytest.approx(expected, rel=1e-9)


@given(
    st.lists(st.tuples(LOADS, HITS, SHAPES, st.integers(0, 80)), min_size=1, max_size=8),
    DEMANDS,
)
def test_candidates_are_those_that_fit_and_begin_soon(make, workers, demand):
    views = [
        make.view(f"w{number}", load=load, card=make.card(**shape), max_running=seats or None)
        for number, (load, _, shape, seats) in enumerate(workers)
    ]
    hits = {view.key: hit for view, (_, hit, *_) in zip(views, workers, strict=True) if hit is not None}
    fitting = [view for view in views if view.fits(demand, hits.get(view.key, NO_HIT))]
    expected = [view for view in fitting if view.start_s <= 1.0 or view.key in hits]
    if not any(view.start_s <= 1.0 for view in fitting):
        expected = []
    assert list(with_room(Candidates.of(views), demand, hits, 1.0)) == expected


def test_blocks_that_are_not_brought_back_count_as_not_cached(make):
    slow_disk = with_tiers(make, cpu=16e9, nvme=0.5e9)
    hit = usable(slow_disk, Hit(7, 2, 5))
    assert hit == Hit(5, 2, 5)
    assert slow_disk.cached_tokens(DEMAND, hit) == 80
    assert slow_disk.load_of(DEMAND, hit).prefill_tokens == 80
    assert usable(slow_disk, Hit(5, 2, 5, peer_blocks=5)) == Hit(5, 2, 5)
