"""Upper bounds of hit rates, counted by hand."""

import pytest

from decodefleet.cluster.simulate.oracle import pooled_hit_rate


def test_endless_cache_finds_all_that_was_there(make):
    arrivals = [make.arrival(prompt=70, chain="abcd"), make.arrival(prompt=70, chain="abxy")]
    arrivals += [make.arrival(prompt=70, chain="abcd")]
    assert pooled_hit_rate(arrivals, 16, None) == pytest.approx((0 + 32 + 64) / 210)


def test_one_token_is_always_computed(make):
    arrivals = [make.arrival(prompt=64, chain="abcd")] * 2
    assert pooled_hit_rate(arrivals, 16, None) == pytest.approx(48 / 128)


def test_small_pool_forgets_the_oldest(make):
    arrivals = [make.arrival(prompt=33, chain=chain) for chain in ("ab", "cd", "ef", "cd", "ab")]
    assert pooled_hit_rate(arrivals, 16, 4) == pytest.approx(32 / 165)
    assert pooled_hit_rate(arrivals, 16, 6) == pytest.approx(64 / 165)


def test_prompt_larger_than_the_pool_leaves_its_head(make):
    arrivals = [make.arrival(prompt=65, chain="abcd")] * 2
    assert pooled_hit_rate(arrivals, 16, 3) == pytest.approx(48 / 130)
