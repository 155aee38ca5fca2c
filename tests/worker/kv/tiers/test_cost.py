from __future__ import annotations

import pytest

from decodefleet.worker.kv.tiers.cost import Link


def test_measured_from_one_block_and_from_several() -> None:
    link = Link.measured(one=0.0005, many=0.0003 + 8 * 0.0002, size=2000, count=8)
    assert link.bytes_per_s == pytest.approx(2000 / 0.0002)
    assert link.latency_s == pytest.approx(0.0003)
    assert link.seconds(4000) == pytest.approx(0.0007)


def test_noise_in_the_measurement_gives_no_infinite_bandwidth() -> None:
    link = Link.measured(one=0.0020, many=0.0010, size=1000, count=8)
    assert 0 < link.bytes_per_s <= 2 * 8 * 1000 / 0.0010
    assert link.latency_s >= 0


def test_the_bandwidth_follows_what_transfers_take() -> None:
    link = Link(0.001, 1e9)
    for _ in range(50):
        link.observe(1_000_000, 0.001 + 0.01)
    assert link.bytes_per_s == pytest.approx(1e8, rel=0.01)
    assert link.measured_bytes_per_s == 1e9


def test_a_link_that_was_found_slow_gets_another_chance() -> None:
    link = Link(0.0, 1e9)
    for _ in range(50):
        link.observe(1_000_000, 1.0)
    slow = link.bytes_per_s
    for _ in range(100):
        link.forgive()
    assert link.bytes_per_s > 0.8e9 > slow
