from __future__ import annotations

from collections import Counter
from itertools import islice, pairwise

import pytest

from decodefleet.cluster.bench.prompts import TokenIds
from decodefleet.cluster.bench.workload import Synthetic, poisson


def test_lengths_are_exact_and_prefixes_shared_within_groups_only() -> None:
    requests = Synthetic(input_len=20, output_len=5, prefix_len=12, prefix_groups=2).requests("run", 4)
    make = TokenIds("seed")
    prompts = [make(request) for request in requests]
    assert [len(prompt) for prompt in prompts] == [20] * 4
    assert [request.output_len for request in requests] == [5] * 4
    assert sorted(Counter(tuple(prompt[:12]) for prompt in prompts).values()) == [2, 2]
    assert len({tuple(prompt[12:]) for prompt in prompts}) == 4


def test_groups_come_in_no_order_that_a_round_robin_would_follow() -> None:
    shape = Synthetic(input_len=2, output_len=1, prefix_len=1, prefix_groups=8)
    keys = [request.segments[0].key for request in shape.requests("run", 256)]
    assert set(Counter(keys).values()) == {32}
    for workers in (2, 8):
        assert all(len(set(keys[worker::workers])) >= 6 for worker in range(workers))
    assert keys == [request.segments[0].key for request in shape.requests("run", 256)]


def test_runs_share_nothing() -> None:
    shape = Synthetic(input_len=8, output_len=1, prefix_len=8)
    (one,), (other,) = shape.requests("a", 1), shape.requests("b", 1)
    make = TokenIds("seed")
    assert make(one) != make(other)
    assert make(one) == TokenIds("seed")(one)
    assert make(one) != TokenIds("another seed")(one)


def test_token_ids_stay_inside_the_vocabulary() -> None:
    (request,) = Synthetic(input_len=5000, output_len=1).requests("run", 1)
    assert set(TokenIds("seed", vocabulary=8)(request)) == {4, 5, 6, 7}
    assert min(TokenIds("seed")(request)) >= 1000


def test_a_prefix_longer_than_the_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="prefix-len 9 does not fit input-len 8"):
        Synthetic(input_len=8, output_len=1, prefix_len=9)


def test_poisson_arrivals_have_the_rate_and_are_repeatable() -> None:
    times = list(islice(poisson(4.0, "seed"), 4001))
    assert times[0] == 0.0
    assert times == sorted(times)
    assert times[-1] == pytest.approx(1000, rel=0.05)
    assert times == list(islice(poisson(4.0, "seed"), 4001))
    gaps = [later - earlier for earlier, later in pairwise(times)]
    # exponential gaps: the standard deviation is the mean
    mean = sum(gaps) / len(gaps)
    assert (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 == pytest.approx(mean, rel=0.1)
