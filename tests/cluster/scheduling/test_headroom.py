"""What is kept free follows what is asked for, within bounds."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from decodefleet.cluster.scheduling.headroom import kept_free

CLAIMS = st.floats(0.0, 1e3)
TIMES = st.floats(0.0, 10.0)


@given(CLAIMS, TIMES, TIMES, st.integers(0, 10_000), st.floats(0.0, 0.5))
def test_never_more_than_the_given_part_of_all(claims, step_s, interval_s, places, most):
    kept = kept_free(claims, step_s, interval_s, places, most)
    assert 0 <= kept <= most * places + 0.5
    # who asks for little has one seat waiting as long as that is no large part
    assert kept >= min(1, round(most * places))


@given(CLAIMS, CLAIMS, TIMES)
def test_more_is_kept_for_more(one, other, step_s):
    less, more = sorted((one, other))
    assert kept_free(less, step_s, 0.0, 1000, 1.0) <= kept_free(more, step_s, 0.0, 1000, 1.0)


def test_as_many_come_by_chance_between_two_steps_find_room():
    rng, step_s, rate = Random(0), 0.1, 9.0
    kept = kept_free(rate, step_s, 0.0, 1000, 1.0)
    late = came = 0
    for _ in range(2000):
        arrivals, at = 0, rng.expovariate(rate)
        while at < step_s:
            arrivals, at = arrivals + 1, at + rng.expovariate(rate)
        came, late = came + arrivals, late + max(0, arrivals - kept)
    assert late < 0.01 * came
    # and not many times that
    assert kept <= 5
