from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from decodefleet.worker.kv.reuse_profile import PRIOR_HAZARD, PRIOR_WEIGHT, SAMPLE, ReuseProfile

WIDTHS = [10.0, 10.0, 20.0, 40.0]


def best_rate(ages: Sequence[float], ends: Sequence[float], start: float) -> float:
    """The index as defined: over all ages to give up, hits by then over time held, from samples of reuse."""
    alive = [age for age in ages if age >= start]
    rates = []
    for end in ends:
        if end > start:
            held = sum(min(age, end) - start for age in alive)
            rates.append(sum(age < end for age in alive) / held)
    return max(rates)


def test_density_is_the_best_rate_of_hits() -> None:
    rng = Random(0)
    # read for a while, then come back or not at all
    ages = [rng.uniform(22, 38) if rng.random() < 0.4 else 10**6 for _ in range(4000)]
    profile = ReuseProfile(1, WIDTHS, sample_of=1)
    now = 0
    for i, age in enumerate(ages):
        name = i.to_bytes(16, "little")
        profile.idle(name, now, 0)
        if age < 10**6:
            profile.used(name, now + round(age))
    (density,) = profile.densities(10**6)
    for bucket, start in enumerate((0.0, 10.0, 20.0, 40.0)):
        assert density[bucket] == pytest.approx(best_rate(ages, [10, 20, 40, 80], start), rel=0.05, abs=2e-4)
    # those who have waited for some time are worth more than those who just left
    assert density[2] > density[1] > density[0] > density[3]


def test_before_anything_is_known_the_recent_is_worth_more() -> None:
    (density,) = ReuseProfile(1, WIDTHS, sample_of=1).densities(0)
    assert density == sorted(density, reverse=True)
    assert density[-1] == pytest.approx(PRIOR_HAZARD / (WIDTHS[-1] * (1 - PRIOR_HAZARD / 2)))


def test_what_went_out_of_sight_half_way_was_at_risk_for_half_of_it() -> None:
    profile = ReuseProfile(1, [10.0], sample_of=1)
    profile.idle(b"a" * 16, 0, 0)
    profile.used(b"a" * 16, 5)
    profile.idle(b"b" * 16, 5, 0)
    pooled = (1 + PRIOR_WEIGHT * PRIOR_HAZARD) / (1.5 + PRIOR_WEIGHT)
    hazard = (1 + PRIOR_WEIGHT * pooled) / (1.5 + PRIOR_WEIGHT)
    assert profile.densities(8)[0][0] == pytest.approx(hazard / (10 * (1 - hazard / 2)))


def test_a_class_with_more_reuse_never_counts_as_worse() -> None:
    profile = ReuseProfile(2, WIDTHS, sample_of=1)
    for i in range(200):
        name = i.to_bytes(16, "little")
        # contents of class 0 come back, those of class 1 never
        profile.idle(name, 0, i % 2)
        if i % 2 == 0:
            profile.used(name, 5)
    rare, often = profile.densities(1000)
    assert all(high >= low for high, low in zip(often, rare, strict=True))


def test_the_sample_is_bounded_and_even() -> None:
    profile = ReuseProfile(1, WIDTHS, sample_of=16 * SAMPLE)
    rng = Random(1)
    names = [rng.randbytes(16) for _ in range(64_000)]
    watched = [name for name in names if profile.watches(name)]
    assert len(watched) == pytest.approx(4000, rel=0.1)
    for now, name in enumerate(names):
        profile.idle(name, now, 0)
    assert len(profile._watched) == SAMPLE
