"""Packed hashes: taken apart as they were joined, and marked densely enough."""

from __future__ import annotations

import pytest

from decodefleet.cluster.scheduling.chain import Chain


def test_broken_tail_is_ignored():
    chain = Chain(b"a" * 16 + b"b" * 16 + b"ccc")
    assert chain.length == 2
    assert chain.part(0, 9) == (b"a" * 16, b"b" * 16)
    assert Chain(b"").marks == ()
    assert Chain(b"").positions == ()


@pytest.mark.parametrize("length", [1, 3, 4, 5, 64, 100, 1000, 5000])
def test_marks_stand_for_the_whole(make, length):
    hashes = make.hashes(length)
    chain = Chain.of(hashes)
    assert list(chain.marks) == [hashes[position] for position in chain.positions]
    assert chain.positions[-1] == length - 1
    assert list(chain.positions) == sorted(set(chain.positions))
    assert len(chain.marks) <= 17 + 8 * max(0, length.bit_length() - 6)
    for shared in range(1, length + 1):
        known = [position + 1 for position in chain.positions if position < shared]
        assert shared - max(known, default=0) <= max(3, shared // 8)


def test_parts(make):
    hashes = make.hashes(10)
    chain = Chain.of(hashes)
    assert [*chain.part(0, 4), *chain.part(4, 4), *chain.part(8, 4)] == hashes


def test_one_block(make):
    hashes = make.hashes(10)
    assert [Chain.of(hashes).block(at) for at in range(10)] == hashes
